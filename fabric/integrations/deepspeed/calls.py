"""`CheckedCall`: the call check for forwards of sharded models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.collectives.frames import ALONE

if TYPE_CHECKING:
    from collections.abc import Callable


class CheckedCall:
    """A call of a sharded model, preceded by a call check, because the engine detects no mismatch.

    Args:
        call: The engine's call, or a method.
        layout: The layout, whose channel is used.
        name: The name of the model, and of the method.
    """

    def __init__(self, call: Callable[..., Any], layout: Any, name: str) -> None:
        self.call, self.layout, self.name = call, layout, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the call, then run it."""
        if self.layout.channel is not None:
            forward = "forward" if torch.is_grad_enabled() else ALONE
            self.layout.channel.check_barrier(f"{forward} of {self.name}")
        return self.call(*args, **kwargs)
