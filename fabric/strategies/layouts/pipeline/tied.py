"""Weights that several stages of a pipeline have: their gradients are added up after a backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fabric.strategies.layouts.agree import on_any_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Parameter

    from fabric.plugins.collectives.channel import Channel


class Tied:
    """A parameter that several stages use: each has a copy, and all get the sum of their gradients.

    Each stage's own contributions are held back, and the sum is added on all of them, so that the copies stay
    the same to the bit.

    Args:
        parameter: This stage's copy.
        channel: Those stages of this pipeline.
        passing: Whether gradients come from the stage's blocks now. Others (of a penalty) are the same on all
            stages, and are not added up.
    """

    def __init__(self, parameter: Parameter, channel: Channel, passing: Callable[[], bool]) -> None:
        self.parameter, self._channel, self._passing = parameter, channel, passing
        self._own: Tensor | None = None
        self._hooked = False

    def arm(self) -> None:
        """Before a forward: from now on, if it is trained. It may have been frozen until here."""
        if self.parameter.requires_grad and not self._hooked:
            self._hooked = True
            self.parameter.register_hook(self._hold_back)

    @torch.no_grad()
    def add_up(self) -> None:
        """The sum over stages into `.grad`. All these stages must call this."""
        own, self._own = self._own, None
        if not self.parameter.requires_grad or not any(on_any_rank([own is not None], self._channel)):
            return
        total = torch.zeros_like(self.parameter) if own is None else own
        total = self._channel.wire.ready(total.contiguous())
        self._channel.collective.all_reduce(total, "sum")
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        self.parameter.grad += total.to(self.parameter.device)

    def forget(self) -> None:
        """Drop what a backward that failed has left."""
        self._own = None

    def _hold_back(self, grad: Tensor) -> Tensor:
        if not self._passing():
            return grad
        grad = grad.to_dense()  # of an embedding it may be sparse, where a linear layer's is not
        self._own = grad.clone() if self._own is None else self._own + grad
        return torch.zeros_like(grad)
