"""Gradients and buffers that several ranks have, made one after a backward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.torch_internals import foreach_copy_
from fabric.plugins.collectives.frames import buckets, join

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.plugins.collectives.channel import Channel


def average_gradients(parameters: list[Any], channel: Channel, where: str) -> None:
    """The mean over ranks in every `.grad`, zeros counting for ranks that have none. All ranks of the group.

    Args:
        parameters: In the same order on all ranks.
        channel: The ranks.
        where: What cannot average sparse gradients, in words.

    Raises:
        UsageError: A gradient is sparse.
    """
    if any([p.grad is not None and p.grad.layout is not torch.strided for p in parameters]):
        raise UsageError(
            f"A gradient is sparse (nn.Embedding(sparse=True)), which {where} cannot average. Write "
            "sparse=False."
        )
    has = on_any_rank([p.grad is not None for p in parameters], channel)
    held = [p for p, any_has in zip(parameters, has, strict=True) if any_has]
    for parameter in held:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _each_bucket([p.grad for p in held], channel, partial(channel.collective.all_reduce, op="mean"))


def on_any_rank(truths: list[bool], channel: Channel) -> list[bool]:
    """Of each, whether it holds on any rank. All ranks of the group must call this."""
    device = torch.device("cpu") if "cpu" in channel.wire.sendable else channel.wire.via
    flags = torch.tensor(truths, dtype=torch.uint8, device=device)
    channel.collective.all_reduce(flags, "max")
    return [bool(flag) for flag in flags.tolist()]


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
                foreach_copy_(alike, [part.view(t.shape) for part, t in zip(parts, alike, strict=True)])
