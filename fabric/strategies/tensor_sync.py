"""Synchronisation of tensors between ranks: average gradients, broadcast parameters and buffers."""

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

BUCKET_BYTES = 25 << 20
"""Maximum size of small tensors that are sent in one message."""


def average_gradients(parameters: list[Any], channel: Channel, where: str) -> None:
    """Replace every `.grad` by the mean over ranks, with zeros for ranks that have none. All ranks of the
    group must call this.

    Args:
        parameters: Parameters, in the same order on all ranks.
        channel: The ranks.
        where: Name of the caller, for the error.

    Raises:
        UsageError: A gradient is sparse.
    """
    if any([p.grad is not None and p.grad.layout is not torch.strided for p in parameters]):
        raise UsageError(
            f"A gradient is sparse (nn.Embedding(sparse=True)), which {where} cannot average. Write "
            "sparse=False."
        )
    has = on_any_rank([p.grad is not None for p in parameters], channel)
    with_grad = [p for p, any_has in zip(parameters, has, strict=True) if any_has]
    for parameter in with_grad:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average = partial(channel.collective.all_reduce, op="mean")
    _exchange_in_buckets([p.grad for p in with_grad], channel, average)


def grad_version(parameter: Tensor) -> Any:
    """Return a value that changes when a gradient is accumulated, in place or as the first one."""
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)


def on_any_rank(truths: list[bool], channel: Channel) -> list[bool]:
    """Return for each condition whether it holds on any rank. All ranks of the group must call this."""
    device = torch.device("cpu") if "cpu" in channel.transport.sendable else channel.transport.staging_device
    flags = torch.tensor(truths, dtype=torch.uint8, device=device)
    channel.collective.all_reduce(flags, "max")
    return [bool(flag) for flag in flags.tolist()]


def differing(tensors: list[Tensor | None], channel: Channel) -> list[bool]:
    """Return for each tensor whether it differs between ranks, by two sums. All ranks must call this."""
    values = [float(number) for tensor in tensors for number in _fingerprint(tensor)]
    local = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=1.0)
    extremes = torch.cat([local, -local]).to(channel.transport.staging_device)
    channel.collective.all_reduce(extremes, "max")
    equal = (extremes[: len(local)] == -extremes[len(local) :]).view(-1, 2).all(1)
    return [not is_equal for is_equal in equal.tolist()]


def _fingerprint(tensor: Tensor | None) -> tuple[Any, Any]:
    if tensor is None:
        return 0.0, -1.0  # None is not zero: with a zero gradient optimizers apply weight decay and momentum
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    flat = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).double().flatten()
    # The second sum has a weight per position: ranks may have the same numbers in other rows (one-hot
    # labels).
    return flat.sum(), (flat * torch.arange(flat.numel(), device=flat.device).double().cos()).sum()


def broadcast_from_group_root(tensors: list[Tensor], channel: Channel) -> None:
    """Broadcast the values of the group's first rank. All ranks of the group must call this."""
    first = channel.collective.members[0]
    _exchange_in_buckets([t.data for t in tensors], channel, partial(channel.collective.broadcast, src=first))


def broadcast_from_zero(tensors: list[Tensor]) -> None:
    """Broadcast rank zero's values of `tensors`, in few messages per dtype. All ranks must call this.

    Writes through `.data`, which does not increase the version counter. Batch norm saves its running
    statistics for backward, and autograd raises if a saved tensor has another version.
    """
    _exchange_in_buckets([t.data for t in tensors], None, partial(dist.broadcast, src=0))


def tensor_buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return buckets: large tensors alone, small ones by dtype and device up to `BUCKET_BYTES`."""
    large, packed = [], []
    filling: dict[Any, tuple[int, list[Tensor]]] = {}
    for tensor in tensors:
        if tensor.nbytes >= PACK_LIMIT:
            large.append([tensor])
        elif tensor.nbytes:
            key = (tensor.dtype, tensor.device)
            size, bucket = filling.get(key, (BUCKET_BYTES, []))
            if size + tensor.nbytes > BUCKET_BYTES:
                size, bucket = 0, []
                packed.append(bucket)
            bucket.append(tensor)
            filling[key] = (size + tensor.nbytes, bucket)
    return large + packed


def unflatten_into(flat: Tensor, bucket: list[Tensor]) -> None:
    """Copy `flat`, the concatenated elements of a bucket, into its tensors."""
    if flat.data_ptr() != bucket[0].data_ptr():
        parts = flat.split([t.numel() for t in bucket])
        foreach_copy_(bucket, [part.view(t.shape) for part, t in zip(parts, bucket, strict=True)])


def _exchange_in_buckets(
    tensors: list[Tensor], channel: Channel | None, exchange: Callable[..., Any]
) -> None:
    """Call `exchange`, which works in place, on each bucket of tensors.

    Without a channel buckets are sent from their device, else from the channel's staging device.
    """
    with torch.no_grad():
        for bucket in tensor_buckets(tensors):
            flat = join(bucket)
            sent = flat if channel is None else channel.transport.to_staging(flat)
            exchange(sent)
            unflatten_into(sent, bucket)
