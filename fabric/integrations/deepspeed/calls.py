"""`Together`: what calls of a split model go through before they reach the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.collectives.frames import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable


class Together:
    """A call of a split model, before which ranks compare what they call: the engine has no word for it.

    Args:
        call: The engine's, or a method's.
        layout: Whose channel this goes by.
        name: Of the model, and of its method.
    """

    def __init__(self, call: Callable[..., Any], layout: Any, name: str) -> None:
        self.call, self.layout, self.name = call, layout, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        if self.layout.channel is not None:
            forward = "forward" if torch.is_grad_enabled() else ALONE
            self.layout.channel.check_barrier(f"{forward} of {self.name}")
        return self.call(*args, **kwargs)
