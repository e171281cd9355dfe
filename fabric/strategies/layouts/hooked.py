"""Outputs that notice a backward, for layouts that synchronise something after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.forward import anchor, differentiable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module


class HookedCall:
    """A forward or bound method whose outputs tell the layout when a backward reaches them.

    Buffers are sent at the end of a backward pass, where all ranks are. DDP sends them before each forward,
    evaluation included; like this an evaluation forward makes no collective and ranks agree during it.
    """

    __slots__ = ("call", "layout", "replica")

    def __init__(self, call: Callable[..., Any], layout: Any, replica: Module) -> None:
        self.call = call
        self.layout = layout
        self.replica = replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; one hook for each output that a backward may start from."""
        out = self.call(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            one = type(out) is torch.Tensor and out.grad_fn is not None
            for leaf in (out,) if one else differentiable(out):
                if leaf.grad_fn is not None:
                    (leaf if leaf._base is None else anchor(leaf)).register_hook(self._reached)
        return out

    def _reached(self, grad: Tensor) -> None:
        self.layout.on_reached(self.replica)

    def __getattr__(self, name: str) -> Any:
        if name in HookedCall.__slots__:  # not set yet, while copying
            raise AttributeError(name)
        return getattr(self.call, name)
