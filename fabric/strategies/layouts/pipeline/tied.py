"""Weights that several stages of a pipeline have: their gradients are added up after a backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Parameter

    from fabric.strategies.layouts.pipeline.link import Link


class Tied:
    """A parameter that several stages use: each has a copy, and all get the sum of their gradients.

    Each stage's own contributions are held back, and the sum is added on all of them, so that the copies stay
    the same to the bit.

    Args:
        parameter: This stage's copy.
        links: (to, from) each of the other stages, if this one is the first of them; else the first alone.
        first: Whether it is.
        passing: Whether gradients come from the stage's blocks now. Others (of a penalty) are the same on all
            stages, and are not added up.
    """

    def __init__(
        self,
        parameter: Parameter,
        links: list[tuple[Link, Link]],
        first: bool,
        passing: Callable[[], bool],
    ) -> None:
        self.parameter, self._links, self.first = parameter, links, first
        self._passing = passing
        self._own: Tensor | None = None
        self._hooked = False

    def arm(self) -> None:
        """Before a forward: from now on, if it is trained. It may have been frozen until here."""
        if self.parameter.requires_grad and not self._hooked:
            self._hooked = True
            self.parameter.register_hook(self._hold_back)

    def add_up(self) -> None:
        """The sum over stages into `.grad`. All these stages must call this."""
        total, self._own = self._own, None
        if not self.parameter.requires_grad:
            return
        if self.first:
            for _, arriving in self._links:
                (other,) = arriving.take()
                total = other if total is None else total if other is None else total + other
            for leaving, _ in self._links:
                leaving.send([total])
                leaving.flush()
        else:
            ((leaving, arriving),) = self._links
            leaving.send([total])
            (total,) = arriving.take()
            leaving.flush()
        if total is None:
            return
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        self.parameter.grad += total

    def forget(self) -> None:
        """Drop what a backward that failed has left."""
        self._own = None

    def _hold_back(self, grad: Tensor) -> Tensor:
        if not self._passing():
            return grad
        self._own = grad.clone() if self._own is None else self._own + grad
        return torch.zeros_like(grad)
