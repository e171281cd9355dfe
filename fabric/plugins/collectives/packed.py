"""Trees across ranks: small leaves of one dtype travel as one flat tensor, large ones as they are.

Each function makes as few collectives as the data allows and is exact. What can be refused is refused before
the first message, on every rank alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._utils import _flatten_dense_tensors as flatten_tensors
from torch._utils import _unflatten_dense_tensors as unflatten_tensors
from torch.autograd.function import once_differentiable

from fabric.core.errors import ArgumentTypeError, UsageError
from fabric.core.tree import flatten, unflatten
from fabric.plugins.collectives.torch_collective import torch_op

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.plugins.collectives.collective import Collective

PACK_LIMIT = 1 << 20
"""Bytes up to which a leaf is copied into a flat tensor; beyond, the copy costs more than a collective."""

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Dtypes that backends do not reduce, and those in which they are reduced with the same result."""

_REDUCIBLE = {
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32,
    torch.float64, torch.complex64, torch.complex128, *_WIDER,
}  # fmt: skip


class Wire(NamedTuple):
    """What a group can send, and how the rest gets there."""

    device: torch.device
    """The rank's own device, where numbers become tensors."""
    sendable: tuple[str, ...]
    """Device types that the group's backend sends from as they are."""
    via: torch.device
    """Where tensors of other devices are copied to travel, and back."""


def to_tensors(leaves: list[Any], device: torch.device, verb: str) -> list[Tensor]:
    """The leaves as tensors; numbers and numpy arrays become new ones on `device`, in torch's usual dtypes.

    Raises:
        ArgumentTypeError: A leaf is neither a dense tensor nor a number.
    """
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                raise ArgumentTypeError(
                    f"{verb} takes dense tensors, but a leaf is {leaf.layout}. Write tensor.to_dense()."
                )
            tensors.append(leaf)
        elif isinstance(leaf, bool | int | float | complex) or type(leaf).__module__ == "numpy":
            tensors.append(torch.tensor(leaf, device=device))
        else:
            raise ArgumentTypeError(
                f"{verb} takes tensors, numbers, and nestings of them, but a leaf is "
                f"{type(leaf).__name__}: {leaf!r:.80}. Convert it to a tensor, or use fabric.broadcast for "
                "objects."
            )
    return tensors


def buckets(tensors: list[Tensor]) -> list[list[int]]:
    """Positions of what travels together: tensors of a dtype and device, large ones alone, empty ones not."""
    groups: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        size = tensor.nbytes
        if size:
            key = position if size > PACK_LIMIT else (tensor.dtype, tensor.device)
            groups.setdefault(key, []).append(position)
    return list(groups.values())


def reduce_tree(data: Any, op: Any, collective: Collective, wire: Wire) -> Any:
    """`data` reduced over ranks: written into its tensors, and returned (numbers as new tensors).

    Args:
        data: A tensor, number, or nesting of them; equal structure, shapes and dtypes on all ranks,
            which must all make the call.
        op: "mean", "sum", "min", "max", "product" or a torch ReduceOp; None is "sum".
        collective: The group.
        wire: Where numbers live and what the group's backend can send.

    Raises:
        ArgumentTypeError: The mean of integers, the order of complex numbers, a dtype that has no reduction,
            a tensor whose elements share memory, or a leaf that is no tensor and no number.
        ConfigurationError: Unknown `op`.
        UsageError: This rank does not belong to the group.
    """
    leaves, spec = flatten(data)
    op = torch_op("sum" if op is None else op)
    tensors = to_tensors(leaves, wire.device, "all_reduce")
    for dtype in {t.dtype for t in tensors}:
        _check_dtype(dtype, op)
    for tensor in tensors:
        if not tensor.is_contiguous():
            _check_layout(tensor, op)
    if _size(collective) > 1:
        # Tensors made under inference_mode (evaluation) can only be written to inside it.
        inference = any([t.is_inference() for t in tensors])
        with torch.no_grad() if not inference else torch.inference_mode():
            for bucket in buckets(tensors):
                _reduce_bucket([tensors[i] for i in bucket], op, collective, wire)
    return unflatten(tensors, spec, data)


def _size(collective: Collective) -> int:
    size = collective.world_size
    if size < 1:
        raise UsageError(
            "This rank is not in the process group that it was called with. "
            "Let only the members of the group make the call."
        )
    return size


def _check_dtype(dtype: torch.dtype, op: Any) -> None:
    refusal = ""
    if dtype not in _REDUCIBLE:
        refusal = "is not defined. Convert first: data.float()"
    elif op == torch_op("mean") and not (dtype.is_floating_point or dtype.is_complex):
        refusal = "would round. Write reduce_op='sum', or convert first: data.float()"
    elif dtype.is_complex and op not in (torch_op("mean"), torch_op("sum")):
        refusal = "is not defined. Reduce torch.view_as_real(data), or its absolute values"
    if refusal:
        raise ArgumentTypeError(f"all_reduce({_op_name(op)}) of a tensor of {dtype} {refusal}.")


def _check_layout(tensor: Tensor, op: Any) -> None:
    if any([stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]):
        raise ArgumentTypeError(
            f"all_reduce({_op_name(op)}) of a tensor of {tensor.dtype} cannot be written in place, since its "
            f"elements share memory. Pass inplace=False, or data.clone()."
        )


def _op_name(op: Any) -> str:
    name = str(getattr(op, "op", op)).rpartition(".")[2].lower()
    return "mean" if name == "avg" else name


def _reduce_bucket(tensors: list[Tensor], op: Any, collective: Collective, wire: Wire) -> None:
    first = tensors[0]
    travels = _wire_dtype(first.dtype, op)
    if (
        len(tensors) == 1
        and travels is first.dtype
        and first.device.type in wire.sendable
        and first.is_contiguous()
        and not (first.is_conj() or first.is_neg())
    ):
        collective.all_reduce(first, op)
        return
    flat = flatten_tensors(tensors).resolve_conj().resolve_neg().to(travels)
    flat = flat if flat.device.type in wire.sendable else flat.to(wire.via)
    collective.all_reduce(flat, op)
    values = unflatten_tensors(flat.to(first.device, first.dtype), tensors)
    if any([t.is_neg() or t.is_conj() for t in tensors]):  # views that the fused copy refuses
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
    else:
        torch._foreach_copy_(tensors, values)


def _wire_dtype(dtype: torch.dtype, op: Any) -> torch.dtype:
    # The mean of float16 numbers is a float16 number, their sum may not be.
    if dtype is torch.float16 and op == torch_op("mean"):
        return torch.float32
    return _WIDER.get(dtype, dtype)


def gather_tree(data: Any, collective: Any, wire: Wire, sync_grads: bool) -> Any:
    """Every leaf of every rank: leaves of shape (world_size, *shape), on the device where they were.

    Args:
        data: A tensor, number, or nesting of them; equal structure, shapes and dtypes on all ranks,
            which must all make the call.
        collective: The group.
        wire: Where numbers live and what the group's backend can send.
        sync_grads: Whether gradients flow back to the rank that a part came from (summed over ranks).

    Raises:
        ArgumentTypeError: A leaf that is no tensor and no number.
        UsageError: This rank does not belong to the group.
    """
    leaves, spec = flatten(data)
    tensors = to_tensors(leaves, wire.device, "all_gather")
    world = _size(collective)
    gathered: list[Any] = [None if t.numel() else t.new_empty(world, *t.shape) for t in tensors]
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        for bucket in buckets(tensors):
            parts = [tensors[i] for i in bucket]
            home = parts[0].device
            flat = flatten_tensors(parts) if len(parts) > 1 else parts[0].reshape(-1)
            flat = flat if home.type in wire.sendable else flat.to(wire.via)
            rows = gather_rows(flat, collective, world).to(home)
            columns = rows.split([t.numel() for t in parts], dim=1)
            for i, column, part in zip(bucket, columns, parts, strict=True):
                gathered[i] = column.reshape(world, *part.shape)
    return unflatten(gathered, spec, data)


def gather_rows(flat: Tensor, collective: Any, world: int) -> Tensor:
    """The (world, numel) table of every rank's flat tensor; differentiable where grad mode is on."""
    if flat.requires_grad and torch.is_grad_enabled():
        rows: Tensor = _GatherWithGrad.apply(flat, collective)  # type: ignore[no-untyped-call]
        return rows
    if world == 1:
        return flat.detach().clone().unsqueeze(0)
    # As bytes: a gather computes nothing, and backends do not know every dtype.
    raw = as_bytes(flat)
    out = raw.new_empty(world * raw.numel())
    collective.all_gather_flat(out, raw)
    return out.view(flat.dtype).view(world, flat.numel())


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of `tensor` as flat bytes, row-major; shares its memory where that is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # one element counts as contiguous with any stride
    return plain.view(torch.uint8)


class _GatherWithGrad(torch.autograd.Function):
    """All-gather whose gradient is the sum of what every rank's loss sends back to this rank's part."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, collective: Any) -> Tensor:
        ctx.collective = collective
        return gather_rows(flat.detach(), collective, collective.world_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.collective.world_size == 1:
            return grads[0][0], None
        # A copy: autograd may have lent the gradient to others too.
        total = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.collective.all_reduce(total, "sum")
        return total[ctx.collective.rank_in_group], None
