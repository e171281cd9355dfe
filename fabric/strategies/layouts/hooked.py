"""Outputs that notice a backward, for layouts that synchronise something after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.forward import HookedForward

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module


class HookedCall(HookedForward):
    """A forward or bound method whose outputs tell the layout when a backward reaches them.

    Buffers are sent at the end of a backward pass, where all ranks are: so an evaluation forward sends none.
    """

    __slots__ = ("layout", "replica")

    def __init__(self, call: Callable[..., Any], layout: Any, replica: Module) -> None:
        super().__init__(call)
        self.layout = layout
        self.replica = replica

    def reached(self, grad: Tensor) -> None:
        """Tell the layout."""
        self.layout.on_reached(self.replica)

    def __getattr__(self, name: str) -> Any:
        if name in ("call", *HookedCall.__slots__):  # not set yet, while copying
            raise AttributeError(name)
        return getattr(self.call, name)
