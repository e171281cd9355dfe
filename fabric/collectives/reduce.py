"""Reduce trees over ranks. Small data are sent in the frame; otherwise there is one reduction per dtype, and
one per large leaf.

Invalid arguments are rejected before the first message, on every rank. The result is bitwise equal on all
ranks: each element is summed on one rank, or on every rank in rank order.
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
"""Names of operations to the call's label and torch's operation."""
_SMALL = 1024
"""Largest tensor for `_reduce_small`, in bytes."""


def reduce_tree(
    data: Any, op: Any, channel: Channel, *, async_op: bool = False, label: str | None = None
) -> Any:
    """Reduce `data` over ranks: the result is written into its tensors, and returned (numbers as tensors).

    Args:
        data: A tensor, number, or nesting of them; equal structure, shapes and dtypes on all ranks,
            which must all make the call.
        op: "mean", "sum", "min", "max", "product" or a torch ReduceOp; None is "sum".
        channel: The group.
        async_op: Whether to return a `Handle` before large data are received.
        label: The user's call, for messages, if not an all_reduce.

    Raises:
        ArgumentTypeError: The mean of integers, the order of complex numbers, a dtype that has no reduction,
            a tensor whose elements share memory, or a leaf that is neither tensor nor number.
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
    label = label or f"all_reduce({op_name(op)})"
    if channel.reducing is not None and torch.is_grad_enabled():
        computed = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        if computed:
            channel.reducing(computed, label, op == _Op.AVG, channel)
    result = unflatten(tensors, spec, data)
    works: list[Any] = []
    with _writable(tensors):
        flats = [_FlatBucket([tensors[i] for i in bucket], op, channel) for bucket in buckets(tensors)]
        sent, may = [flat.sent for flat in flats], foldable(op) and all_on_host(tensors)
        tables, _ = channel.exchange_small(
            tree_call(label, spec, tensors), sent, lambda: _separate(flats), may, op
        )
        if tables is None:
            works = [channel.collective.start_all_reduce(flat.sent, op) for flat in flats]
        else:
            for flat, table in zip(flats, tables, strict=True):
                flat.write_back(fold(table, op))

    def finish() -> Any:
        for work, flat in zip(works, flats if works else [], strict=True):
            with _writable(flat.tensors):
                work.wait()
                flat.write_back(flat.sent)
        return result

    if not async_op:
        return finish()
    from fabric.collectives.handle import Handle

    return Handle(label, works, finish)


def _reduce_small(tensor: Tensor, op: Any, channel: Channel) -> bool:
    """Reduce one small plain tensor in half the operations of `reduce_tree`; return whether it was reduced.

    For a loop's loss in every step. `reduce_tree` handles other tensors, and invalid arguments.
    """
    dtype, guard = tensor.dtype, channel.guard
    name = _PLAIN.get(op) if isinstance(op, str) else None
    if (
        name is None
        or guard is None
        or not guard.gathers_data
        or (dtype is not torch.float32 and dtype is not torch.float64)
        or type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or not tensor.is_cpu
        or not 0 < tensor.nbytes <= _SMALL
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_inference()
        or (tensor.requires_grad and channel.reducing is not None and (op != "mean" or tensor.dim()))
    ):
        return False
    with torch.no_grad():
        frames = channel.check_call(tree_call(name[0], LEAF, [tensor]), [tensor])
        if frames is None:  # the first call of the group turned the call check off
            return False
        tensor.view(-1).copy_(fold(frames.columns([tensor])[0], name[1]))
    return True


def wire_dtype(dtype: torch.dtype, op: Any) -> torch.dtype:
    """Return the dtype to reduce data in: a wider one if the engine lacks theirs, or the result overflows."""
    # The mean of float16 numbers fits into float16, their sum may not.
    if dtype is torch.float16 and op == _Op.AVG:
        return torch.float32
    return WIDER.get(dtype, dtype)


def foldable(op: Any) -> bool:
    """Whether each rank can compute the reduction locally from the gathered data of all ranks."""
    return isinstance(op, _Op.RedOpType) and op in FOLDS


class _FlatBucket:
    """Tensors of one dtype and device that are reduced as one flat tensor; a single suitable tensor is
    reduced in place.
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
        if self.sent.data_ptr() == first.data_ptr():  # a view; only `write_back` may change the tensor
            self.sent = self.sent.clone()

    def write_back(self, flat: Tensor) -> None:
        """Write the result into the tensors."""
        first = self.tensors[0]
        if flat is first:
            return  # it was reduced in place
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


def _separate(flats: list[_FlatBucket]) -> None:
    """Copy buckets that share memory: a tree may contain a tensor twice, and tensors are reduced in place."""
    seen = set()
    for flat in flats:
        memory = flat.sent.untyped_storage().data_ptr()
        if memory in seen:
            flat.sent = flat.sent.clone()
        seen.add(memory)


def _writable(tensors: list[Tensor]) -> Any:
    # Tensors made under inference_mode (evaluation) can only be written to inside it.
    inference = any([t.is_inference() for t in tensors])
    return torch.inference_mode() if inference else torch.no_grad()
