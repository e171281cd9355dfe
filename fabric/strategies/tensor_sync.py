"""Tensors that several ranks have, made one: mean gradients, and parameters and buffers of one rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.collectives.frames import PACK_LIMIT, join
from fabric.core._torch import foreach_copy_
from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabric.collectives.channel import Channel

PARCEL_BYTES = 25 << 20
"""Up to how many bytes of small tensors travel in one message."""


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
    _each_parcel([p.grad for p in held], channel, partial(channel.collective.all_reduce, op="mean"))


def grad_version(parameter: Tensor) -> Any:
    """Something that changes when a gradient is accumulated: in place, or as the first one."""
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)


def on_any_rank(truths: list[bool], channel: Channel) -> list[bool]:
    """Return for each condition whether it holds on any rank. All ranks of the group must call this."""
    device = torch.device("cpu") if "cpu" in channel.transport.sendable else channel.transport.staging_device
    flags = torch.tensor(truths, dtype=torch.uint8, device=device)
    channel.collective.all_reduce(flags, "max")
    return [bool(flag) for flag in flags.tolist()]


def differing(tensors: list[Tensor | None], channel: Channel) -> list[bool]:
    """Return for each tensor whether ranks differ in it, by two sums. All ranks must call this."""
    values = [float(number) for tensor in tensors for number in _sums(tensor)]
    own = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=1.0)
    both = torch.cat([own, -own]).to(channel.transport.staging_device)
    channel.collective.all_reduce(both, "max")
    same = (both[: len(own)] == -both[len(own) :]).view(-1, 2).all(1)
    return [not one for one in same.tolist()]


def _sums(tensor: Tensor | None) -> tuple[Any, Any]:
    if tensor is None:
        return 0.0, -1.0  # zeros are something else: they decay weights, and momentum
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    flat = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).double().flatten()
    # Each place by a weight of its own: ranks may have the same numbers in other rows (one-hot labels).
    return flat.sum(), (flat * torch.arange(flat.numel(), device=flat.device).double().cos()).sum()


def broadcast_from_group_root(tensors: list[Tensor], channel: Channel) -> None:
    """The values that the first rank of the group has. All its ranks must call this."""
    first = channel.collective.members[0]
    _each_parcel([t.data for t in tensors], channel, partial(channel.collective.broadcast, src=first))


def broadcast_from_zero(tensors: list[Tensor]) -> None:
    """Rank zero's values in `tensors` on all ranks, in few messages per dtype. All ranks must call this.

    Writes through `.data`: batch norm saves its running statistics for backward, and a counted in-place
    change between a forward and a later backward would make autograd refuse that.
    """
    _each_parcel([t.data for t in tensors], None, partial(dist.broadcast, src=0))


def tensor_buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return buckets: large tensors alone, small ones by dtype and device up to `PARCEL_BYTES`."""
    alone, packed = [], []
    filling: dict[Any, tuple[int, list[Tensor]]] = {}
    for tensor in tensors:
        if tensor.nbytes >= PACK_LIMIT:
            alone.append([tensor])
        elif tensor.nbytes:
            key = (tensor.dtype, tensor.device)
            size, parcel = filling.get(key, (PARCEL_BYTES, []))
            if size + tensor.nbytes > PARCEL_BYTES:
                size, parcel = 0, []
                packed.append(parcel)
            parcel.append(tensor)
            filling[key] = (size + tensor.nbytes, parcel)
    return alone + packed


def unflatten_into(flat: Tensor, parcel: list[Tensor]) -> None:
    """Put what came in `flat`, the joined elements of a parcel, into its tensors."""
    if flat.data_ptr() != parcel[0].data_ptr():
        parts = flat.split([t.numel() for t in parcel])
        foreach_copy_(parcel, [part.view(t.shape) for part, t in zip(parts, parcel, strict=True)])


def _each_parcel(tensors: list[Tensor], channel: Channel | None, exchange: Callable[..., Any]) -> None:
    """Exchange tensors in place, parcel by parcel; without a channel those of all ranks, as they are."""
    with torch.no_grad():
        for parcel in tensor_buckets(tensors):
            flat = join(parcel)
            sent = flat if channel is None else channel.transport.to_staging(flat)
            exchange(sent)
            unflatten_into(sent, parcel)
