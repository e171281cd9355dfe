"""What calls of a model go through before they reach the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.plugins.collectives.frames import ALONE

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
            self.layout.channel.announce(f"{forward} of {self.name}")
        return self.call(*args, **kwargs)


class Attached:
    """A method of the user's module, whose outputs begin a backward as those of the engine's forward do."""

    def __init__(self, engine: Any, method: Callable[..., Any]) -> None:
        self.engine, self.method = engine, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        from deepspeed.runtime.utils import register_output_backward_hooks

        out = self.method(*args, **kwargs)
        if torch.is_grad_enabled():
            register_output_backward_hooks(
                out,
                preprocess_once_fn=self.engine._backward_prologue,
                preprocess_per_tensor_fn=self.engine._backward_prologue_per_tensor,
            )
        return out
