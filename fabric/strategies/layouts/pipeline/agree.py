"""Gradients and buffers that several ranks have, made one after a backward: tied weights and data parallel
rows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.plugins.collectives.channel import buckets, join

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from fabric.plugins.collectives.channel import Channel
    from fabric.strategies.layouts.pipeline.link import Link


class Tied:
    """A parameter that several stages use: each has a copy, and all get the sum of their gradients.

    Each stage's own contributions are held back, and the sum is added on all of them, so that the copies stay
    the same to the bit.

    Args:
        parameter: This stage's copy.
        links: (to, from) each of the other stages, if this one is the first of them; else the first alone.
        first: Whether it is.
    """

    def __init__(self, parameter: Parameter, links: list[tuple[Link, Link]], first: bool) -> None:
        self.parameter, self._links, self.first = parameter, links, first
        self._own: Tensor | None = None
        self._hooked = False

    def arm(self) -> None:
        """Before a forward: from now on, if it is trained. It may have been frozen until here."""
        if self.parameter.requires_grad and not self._hooked:
            self._hooked = True
            self.parameter.register_hook(self._hold_back)

    def add_up(self) -> None:
        """The sum over stages into `.grad`. All these stages must call this."""
        if not self.parameter.requires_grad:
            return
        total, self._own = self._own, None
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
        self._own = grad.clone() if self._own is None else self._own + grad
        return torch.zeros_like(grad)


def average_gradients(parameters: list[Any], channel: Channel) -> None:
    """The mean over ranks in every `.grad`, zeros counting for ranks that have none. All ranks of the group.

    Raises:
        UsageError: A gradient is sparse.
    """
    if any([p.grad is not None and p.grad.layout is not torch.strided for p in parameters]):
        raise UsageError(
            "A gradient is sparse (nn.Embedding(sparse=True)), which a pipeline with several data parallel "
            "rows cannot average. Write sparse=False."
        )
    device = torch.device("cpu") if "cpu" in channel.wire.sendable else channel.wire.via
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=device)
    channel.collective.all_reduce(has, "max")
    held = [p for p, any_has in zip(parameters, has.tolist(), strict=True) if any_has]
    for parameter in held:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _each_bucket([p.grad for p in held], channel, partial(channel.collective.all_reduce, op="mean"))


def copy_from_first(tensors: list[Tensor], channel: Channel) -> None:
    """The values that the first rank of the group has. All its ranks must call this."""
    first = torch.distributed.get_process_group_ranks(channel.collective.group)[0]
    _each_bucket([t.data for t in tensors], channel, partial(channel.collective.broadcast, src=first))


def _each_bucket(tensors: list[Tensor], channel: Channel, exchange: Any) -> None:
    with torch.no_grad():
        for positions in buckets(tensors):
            alike = [tensors[position] for position in positions]
            flat = join(alike)
            sent = channel.wire.ready(flat)
            exchange(sent)
            if sent.data_ptr() != alike[0].data_ptr():
                parts = sent.split([t.numel() for t in alike])
                torch._foreach_copy_(
                    alike, [part.view(t.shape) for part, t in zip(parts, alike, strict=True)]
                )
