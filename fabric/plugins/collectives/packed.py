"""Trees across ranks: small leaves of one dtype travel as one flat tensor, large ones as they are.

Each function makes as few collectives as the data allows and is exact: tensors are never pickled.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.core.errors import ArgumentTypeError
from fabric.core.tree import Spec, flatten, unflatten
from fabric.plugins.collectives.torch_collective import torch_op

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.plugins.collectives.collective import Collective

PACK_LIMIT = 1 << 20
"""Bytes up to which a leaf is copied into a flat tensor; beyond, the copy costs more than a collective."""

FRAME_BYTES = 2048
"""Size of the first message of `broadcast_tree`: structure and small objects ride in it."""


class Wire(NamedTuple):
    """What a group can send, and how the rest gets there."""

    device: torch.device
    """The rank's own device, where numbers become tensors."""
    sendable: tuple[str, ...]
    """Device types that the group's backend sends from as they are."""
    via: torch.device
    """Where tensors of other devices are copied to travel, and back."""


def to_tensors(leaves: list[Any], device: torch.device, verb: str) -> list[Tensor]:
    """The leaves as tensors; numbers become 0-dim tensors on `device` (integers int64, floats default dtype).

    Raises:
        ArgumentTypeError: A leaf is neither tensor nor number.
    """
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, bool | int | float | complex) or type(leaf).__module__ == "numpy":
            tensors.append(torch.as_tensor(leaf, device=device))
        else:
            raise ArgumentTypeError(
                f"{verb} takes tensors, numbers, and nestings of them, but a leaf is {type(leaf).__name__}: {leaf!r:.80}. "
                f"Convert it to a tensor, or use fabric.broadcast / all_gather_object for objects."
            )
    return tensors


def buckets(tensors: list[Tensor]) -> list[list[int]]:
    """Positions of the tensors that travel together: by dtype and device, large ones alone."""
    groups: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        large = tensor.numel() * tensor.element_size() > PACK_LIMIT
        key = position if large else (tensor.dtype, tensor.device)
        groups.setdefault(key, []).append(position)
    return list(groups.values())


def reduce_tree(data: Any, op: Any, collective: Collective, wire: Wire) -> Any:
    """`data` reduced over ranks: written into its tensors, and returned (numbers as new tensors).

    Args:
        data: A tensor, number, or nesting of them.
        op: "mean", "sum", "min", "max", "product" or a torch ReduceOp; None is "sum".
        collective: The group.
        wire: Where numbers live and what the group's backend can send.

    Raises:
        ArgumentTypeError: The mean of integers, or a leaf that is no tensor and no number.
        ConfigurationError: Unknown `op`.
    """
    leaves, spec = flatten(data)
    tensors = to_tensors(leaves, wire.device, "all_reduce")
    op = "sum" if op is None else op
    mean = torch_op(op) == torch_op("mean")
    if mean:
        _refuse_integer_mean(tensors)
    if collective.world_size > 1:
        with torch.no_grad():
            for bucket in buckets(tensors):
                _reduce_bucket([tensors[i] for i in bucket], "sum" if mean else op, mean, collective, wire)
    return unflatten(tensors, spec, data)


def _refuse_integer_mean(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ArgumentTypeError(
                f"all_reduce(reduce_op='mean') of {tensor.dtype} would round. "
                f"Write reduce_op='sum', or convert first: data.float()."
            )


def _reduce_bucket(tensors: list[Tensor], op: Any, mean: bool, collective: Collective, wire: Wire) -> None:
    first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous() and first.device.type in wire.sendable:
        collective.all_reduce(first, op)
        if mean:
            first.div_(collective.world_size)
        return
    flat = torch.cat([t.reshape(-1) for t in tensors]) if len(tensors) > 1 else first.contiguous()
    flat = flat if flat.device.type in wire.sendable else flat.to(wire.via)
    collective.all_reduce(flat, op)
    if mean:
        flat.div_(collective.world_size)
    parts = flat.to(first.device).split([t.numel() for t in tensors])
    torch._foreach_copy_(tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])


def gather_tree(data: Any, collective: Any, wire: Wire, sync_grads: bool) -> Any:
    """Every leaf of every rank: leaves of shape (world_size, *shape), on the device where they were.

    Args:
        data: A tensor, number, or nesting of them; the same structure, shapes and dtypes on every rank.
        collective: The group.
        wire: Where numbers live and what the group's backend can send.
        sync_grads: Whether gradients flow back to the rank that a part came from (summed over ranks).
    """
    leaves, spec = flatten(data)
    tensors = to_tensors(leaves, wire.device, "all_gather")
    gathered: list[Any] = [None] * len(tensors)
    world = collective.world_size
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        for bucket in buckets(tensors):
            parts = [tensors[i] for i in bucket]
            home = parts[0].device
            flat = torch.cat([t.reshape(-1) for t in parts]) if len(parts) > 1 else parts[0].reshape(-1)
            flat = flat if home.type in wire.sendable else flat.to(wire.via)
            rows = gather_rows(flat, collective, world).to(home)
            columns = rows.split([t.numel() for t in parts], dim=1)
            for i, column, part in zip(bucket, columns, parts, strict=True):
                gathered[i] = column.reshape(world, *part.shape)
    return unflatten(gathered, spec, data)


def gather_rows(flat: Tensor, collective: Any, world: int) -> Tensor:
    """The (world, numel) table of every rank's flat tensor; differentiable where grad mode is on."""
    if flat.requires_grad and torch.is_grad_enabled():
        rows: Tensor = _GatherWithGrad.apply(flat, collective)
        return rows
    if world == 1:
        return flat.detach().clone().unsqueeze(0)
    out = flat.new_empty(world * flat.numel())
    collective.all_gather_flat(out, flat.detach().contiguous())
    return out.view(world, -1)


class _GatherWithGrad(torch.autograd.Function):
    """All-gather whose gradient is the sum over ranks of what each rank's loss sends back to this rank's part."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, collective: Any) -> Tensor:
        ctx.collective = collective
        return gather_rows(flat.detach(), collective, collective.world_size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        if ctx.collective.world_size == 1:
            return grad[0], None
        ctx.collective.all_reduce(grad, "sum")
        return grad[ctx.collective.rank_in_group], None


class _Shipped:
    """Stands in the pickled structure for a tensor that travels beside it."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.on_host = tensor.device.type == "cpu"
        self.requires_grad = tensor.requires_grad and tensor.is_leaf


def broadcast_tree(data: Any, src: int, collective: Collective, wire: Wire) -> Any:
    """`src`'s `data` on every rank; tensors travel as bytes, everything else pickled, in two messages or more.

    Args:
        data: Any nesting; what ranks other than `src` pass is ignored.
        src: Global rank that sends.
        collective: The group.
        wire: Where numbers live and what the group's backend can send.
    """
    if collective.world_size == 1:
        return data
    sender = collective.rank == src
    control = torch.device("cpu") if "cpu" in wire.sendable else wire.via
    if not sender:
        spec, leaves = _receive_structure(src, collective, control)
        tensors = [
            torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu" if leaf.on_host else wire.device)
            for leaf in leaves
            if isinstance(leaf, _Shipped)
        ]
        _ship(tensors, False, src, collective, wire)
        arrived = iter(tensors)
        return unflatten([_unpack(leaf, arrived) for leaf in leaves], spec)
    leaves, spec = flatten(data)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    outline = [_Shipped(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    _send_structure((spec, outline), src, collective, control)
    _ship([t.detach().contiguous() for t in tensors], True, src, collective, wire)
    return data


def _unpack(leaf: Any, arrived: Any) -> Any:
    if not isinstance(leaf, _Shipped):
        return leaf
    tensor = next(arrived)
    return tensor.requires_grad_() if leaf.requires_grad else tensor


def _send_structure(structure: Any, src: int, collective: Collective, control: torch.device) -> None:
    payload = pickle.dumps(structure)
    head = len(payload).to_bytes(8, "little") + payload[: FRAME_BYTES - 8]
    frame = torch.frombuffer(bytearray(head.ljust(FRAME_BYTES, b"\0")), dtype=torch.uint8)
    collective.broadcast(frame.to(control), src)
    if len(payload) > FRAME_BYTES - 8:
        rest = torch.frombuffer(bytearray(payload[FRAME_BYTES - 8 :]), dtype=torch.uint8)
        collective.broadcast(rest.to(control), src)


def _receive_structure(src: int, collective: Collective, control: torch.device) -> tuple[Spec, list[Any]]:
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8, device=control)
    head = bytes(collective.broadcast(frame, src).cpu().numpy())
    length = int.from_bytes(head[:8], "little")
    payload = head[8 : 8 + length]
    if length > FRAME_BYTES - 8:
        rest = torch.empty(length - (FRAME_BYTES - 8), dtype=torch.uint8, device=control)
        payload += bytes(collective.broadcast(rest, src).cpu().numpy())
    structure: tuple[Spec, list[Any]] = pickle.loads(payload)
    return structure


def _ship(
    tensors: list[Tensor],
    sender: bool,
    src: int,
    collective: Collective,
    wire: Wire,
) -> None:
    """Broadcast the bytes of `tensors` in place. Buckets come out alike on all ranks: they follow sizes and devices."""
    raw = [t.view(-1).view(torch.uint8) if t.numel() else t.new_empty(0, dtype=torch.uint8) for t in tensors]
    for bucket in buckets(raw):
        parts = [raw[i] for i in bucket]
        home = parts[0].device
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        sent = flat if home.type in wire.sendable else flat.to(wire.via)
        if sent.numel():
            collective.broadcast(sent, src)
        if sender or (len(parts) == 1 and sent is flat):
            continue
        pieces = sent.to(home).split([p.numel() for p in parts])
        torch._foreach_copy_(parts, list(pieces))
