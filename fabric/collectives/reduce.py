"""Trees reduced over ranks. Small data are sent in the frame; else one reduction per dtype, large leaves by
themselves.

What can be refused is refused before the first message, on every rank alike. The result has the same bits on
every rank: each element is added up in one place, or everywhere in the order of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.collectives.channel import WIDER, check_writable, op_name, reducible, torch_op
from fabric.collectives.frames import FOLDS, all_on_host, buckets, fold, join, tree_call
from fabric.core._torch import foreach_copy_
from fabric.core.tree import CONSTANTS, LEAF, flatten, unflatten

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.collectives.channel import Channel

_Op = dist.ReduceOp
_PLAIN = {name: (f"all_reduce({name})", torch_op(name)) for name in ("mean", "sum", "min", "max", "product")}
"""For the plain names of operations: the call's label, and torch's operation."""
_SMALL = 1024
"""Bytes of a tensor that is reduced in few steps."""


def reduce_tree(
    data: Any, op: Any, channel: Channel, *, async_op: bool = False, label: str | None = None
) -> Any:
    """`data` reduced over ranks: written into its tensors, and returned (numbers as new tensors).

    Args:
        data: A tensor, number, or nesting of them; equal structure, shapes and dtypes on all ranks,
            which must all make the call.
        op: "mean", "sum", "min", "max", "product" or a torch ReduceOp; None is "sum".
        channel: The group.
        async_op: Whether to return a `Handle` while large data are on their way.
        label: What the call is to the user, if not an all_reduce.

    Raises:
        ArgumentTypeError: The mean of integers, the order of complex numbers, a dtype that has no reduction,
            a tensor whose elements share memory, or a leaf that is no tensor and no number.
        ConfigurationError: Unknown `op`.
        CollectiveMismatch: Ranks made different calls; raised on all of them.
        UsageError: This rank does not belong to the group.
    """
    channel.world_size  # noqa: B018 - raises for ranks outside the group
    if type(data) is torch.Tensor and not async_op and label is None and _reduce_small(data, op, channel):
        return data
    leaves, spec = flatten(data, CONSTANTS)
    with channel.validating("all_reduce"):
        op = torch_op("sum" if op is None else op)
        tensors = reducible(leaves, op, channel.transport.device, "all_reduce")
        check_writable(tensors, op)
    result = unflatten(tensors, spec, data)
    label = label or f"all_reduce({op_name(op)})"
    works: list[Any] = []
    with _writable(tensors):
        parcels = [_Parcel([tensors[i] for i in bucket], op, channel) for bucket in buckets(tensors)]
        sent, may = [parcel.sent for parcel in parcels], foldable(op) and all_on_host(tensors)
        tables, _ = channel.exchange_small(tree_call(label, spec, tensors), sent, lambda: _part(parcels), may)
        if tables is None:
            works = [channel.collective.start_all_reduce(parcel.sent, op) for parcel in parcels]
        else:
            for parcel, table in zip(parcels, tables, strict=True):
                parcel.deliver(fold(table, op))

    def finish() -> Any:
        for work, parcel in zip(works, parcels if works else [], strict=True):
            with _writable(parcel.tensors):
                work.wait()
                parcel.deliver(parcel.sent)
        return result

    if not async_op:
        return finish()
    from fabric.collectives.handle import Handle

    return Handle(label, works, finish)


def _reduce_small(tensor: Tensor, op: Any, channel: Channel) -> bool:
    """Reduce one small plain tensor as `reduce_tree` does, in half the operations; gives whether it did.

    A loop's loss, every step. What is not plain, or not allowed, goes the general way.
    """
    dtype, guard = tensor.dtype, channel.guard
    name = _PLAIN.get(op) if isinstance(op, str) else None
    if (
        name is None
        or guard is None
        or not guard.whole
        or (dtype is not torch.float32 and dtype is not torch.float64)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or not tensor.is_cpu
        or not 0 < tensor.nbytes <= _SMALL
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_inference()
    ):
        return False
    with torch.no_grad():
        meeting = channel.check_call(tree_call(name[0], LEAF, [tensor]), [tensor])
        if meeting is None:  # the first call of the group, which turned the guard off
            return False
        tensor.view(-1).copy_(fold(meeting.columns([tensor])[0], name[1]))
    return True


def wire_dtype(dtype: torch.dtype, op: Any) -> torch.dtype:
    """The dtype in which data are reduced: as they are, where the engine can and the result is exact."""
    # The mean of float16 numbers is a float16 number, their sum may not be.
    if dtype is torch.float16 and op == _Op.AVG:
        return torch.float32
    return WIDER.get(dtype, dtype)


def foldable(op: Any) -> bool:
    """Whether ranks can compute the reduction by themselves from everybody's data."""
    return isinstance(op, _Op.RedOpType) and op in FOLDS


class _Parcel:
    """Tensors of one dtype and device that travel as one flat tensor; a single fitting one travels as it
    is.
    """

    def __init__(self, tensors: list[Tensor], op: Any, channel: Channel) -> None:
        first, transport = tensors[0], channel.transport
        dtype = wire_dtype(first.dtype, op)
        self.tensors = tensors
        if (
            len(tensors) == 1
            and dtype is first.dtype
            and first.device.type in transport.sendable
            and first.is_contiguous()
            and not (first.is_conj() or first.is_neg())
        ):
            self.sent = first
            return
        self.sent = transport.to_staging(join(tensors).resolve_conj().resolve_neg().to(dtype))
        if self.sent.data_ptr() == first.data_ptr():  # a view of what may only be written through `deliver`
            self.sent = self.sent.clone()

    def deliver(self, flat: Tensor) -> None:
        """Write the result into the tensors."""
        first = self.tensors[0]
        if flat is first:
            return  # it was reduced where it is
        if len(self.tensors) == 1:
            first.copy_(flat.view(first.shape))
            return
        parts = flat.to(first.device, first.dtype).split([t.numel() for t in self.tensors])
        values = [v if t.dim() == 1 else v.view(t.shape) for v, t in zip(parts, self.tensors, strict=True)]
        try:
            foreach_copy_(self.tensors, values)
        except RuntimeError:  # conjugate and negative views
            for tensor, value in zip(self.tensors, values, strict=True):
                tensor.copy_(value)


def _part(parcels: list[_Parcel]) -> None:
    """Give each parcel memory of its own: a tensor may stand in a tree twice, and is reduced in place."""
    taken = set()
    for parcel in parcels:
        memory = parcel.sent.untyped_storage().data_ptr()
        if memory in taken:
            parcel.sent = parcel.sent.clone()
        taken.add(memory)


def _writable(tensors: list[Tensor]) -> Any:
    # Tensors made under inference_mode (evaluation) can only be written to inside it.
    inference = any([t.is_inference() for t in tensors])
    return torch.inference_mode() if inference else torch.no_grad()
