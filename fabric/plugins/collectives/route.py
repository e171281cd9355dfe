"""Trees whose leaves are split along dim 0, a part for each rank: reduce_scatter, all_to_all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ConfigurationError, FabricError
from fabric.core.tree import flatten, unflatten
from fabric.plugins.collectives.channel import all_on_host, as_bytes, to_tensors
from fabric.plugins.collectives.frames import ROOM, tree_call
from fabric.plugins.collectives.operations import torch_op
from fabric.plugins.collectives.ordered import from_ordered, to_ordered
from fabric.plugins.collectives.reduce import engine_op, fold, foldable, op_name, reducible, wire_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.plugins.collectives.channel import Channel
    from fabric.plugins.collectives.control import Meeting


def reduce_scatter_tree(data: Any, op: Any, channel: Channel, *, label: str | None = None) -> Any:
    """This rank's part of the reduced data: leaves of shape (n / world_size, ...) for leaves of (n, ...).

    Args:
        data: Equal structure, shapes and dtypes on all ranks, which must all make the call. Left as it is.
        op: As for `reduce_tree`.
        channel: The group.
        label: What the call is to the user, if not a reduce_scatter.

    Raises:
        ConfigurationError: The first dimension of a leaf does not divide by the number of ranks.
        ArgumentTypeError: As for `reduce_tree`.
        CollectiveMismatch: Ranks made different calls; raised on all of them.
    """
    world = channel.world_size
    leaves, spec = flatten(data)
    try:
        op = torch_op("sum" if op is None else op)
        tensors = reducible(leaves, op, channel, "reduce_scatter")
        check_parts([list(t.shape) for t in tensors], world, "reduce_scatter")
    except FabricError as error:
        channel.refuse("reduce_scatter", error)
        raise
    if world == 1:
        return unflatten([t.detach().clone() for t in tensors], spec, data)
    groups = _kinds(tensors)
    sent = [_matrix([tensors[i] for i in g], world).to(wire_dtype(tensors[g[0]].dtype, op)) for g in groups]
    rides = all_on_host(tensors) and foldable(op) and sum([m.nbytes for m in sent]) <= ROOM
    call = tree_call(label or f"reduce_scatter({op_name(op)})", spec, tensors)
    meeting = channel.meet(call, [as_bytes(m) for m in sent] if rides else None)
    results: list[Any] = [
        None if t.numel() else t.new_empty(t.shape[0] // world, *t.shape[1:]) for t in tensors
    ]
    start = 0
    for group, matrix in zip(groups, sent, strict=True):
        if rides and meeting is not None:
            reduced = fold(_column(meeting, start, matrix, channel), op)
            start += matrix.nbytes
        else:
            reduced = _reduce_row(channel.wire.ready(matrix), op, channel)
        _deal(reduced, group, tensors, results, world)
    return unflatten(results, spec, data)


def all_to_all_tree(data: Any, channel: Channel, *, verb: str = "all_to_all") -> Any:
    """Part i of each leaf goes to rank i of the group, and comes as part r from rank r. Shapes stay as they
    are.

    Args:
        data: Equal structure, shapes and dtypes on all ranks, which must all make the call. Left as it is.
        channel: The group.
        verb: What the call is to the user.

    Raises:
        ConfigurationError: The first dimension of a leaf does not divide by the number of ranks.
        ArgumentTypeError: A leaf that is no tensor.
        CollectiveMismatch: Ranks made different calls; raised on all of them.
    """
    world = channel.world_size
    leaves, spec = flatten(data)
    try:
        tensors = to_tensors(leaves, channel.wire.device, "all_to_all")
        check_parts([list(t.shape) for t in tensors], world, "all_to_all")
    except FabricError as error:
        channel.refuse("all_to_all", error)
        raise
    if world == 1:
        return unflatten([t.detach().clone() for t in tensors], spec, data)
    groups = _kinds(tensors)
    sent = [_matrix([tensors[i] for i in group], world) for group in groups]
    rides = all_on_host(tensors) and sum([m.nbytes for m in sent]) <= ROOM
    meeting = channel.meet(tree_call(verb, spec, tensors), [as_bytes(m) for m in sent] if rides else None)
    results: list[Any] = [None if t.numel() else torch.empty_like(t) for t in tensors]
    start = 0
    for group, matrix in zip(groups, sent, strict=True):
        if rides and meeting is not None:
            rows = _column(meeting, start, matrix, channel)
            start += matrix.nbytes
        else:
            rows = _exchange_rows(channel.wire.ready(matrix), channel)
        rows, parts = rows.to(matrix.device), [tensors[i] for i in group]
        widths = [part.numel() // world for part in parts]
        for i, column, part in zip(group, rows.split(widths, dim=1), parts, strict=True):
            results[i] = column.reshape(part.shape)
    return unflatten(results, spec, data)


def check_parts(shapes: list[list[int]], world: int, verb: str) -> None:
    """Raise unless every leaf splits into `world` equal parts along dim 0."""
    for shape in shapes:
        if not shape or shape[0] % world:
            why = (
                "has no dim 0"
                if not shape
                else f"has {shape[0]} rows, which {world} ranks cannot share evenly"
            )
            raise ConfigurationError(
                f"{verb} splits every leaf along dim 0 into one part per rank, but a leaf of shape {shape} "
                f"{why}. Give it a first dimension that divides by {world}, such as [{world}, ...]."
            )


def _kinds(tensors: list[Tensor]) -> list[list[int]]:
    """Positions of what travels together: tensors of a dtype and device, but for empty ones."""
    kinds: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(position)
    return list(kinds.values())


def _matrix(tensors: list[Tensor], world: int) -> Tensor:
    """(world_size, numel): row r holds the parts of all tensors that are for rank r."""
    parts = [t.detach().resolve_conj().resolve_neg().reshape(world, t.numel() // world) for t in tensors]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()


def _column(meeting: Meeting, start: int, matrix: Tensor, channel: Channel) -> Tensor:
    """(world_size, numel): the row for this rank of every rank's matrix."""
    width, me = matrix.shape[1], channel.collective.rank_in_group
    return meeting.column(start + me * width * matrix.itemsize, width, matrix.dtype)


def _reduce_row(matrix: Tensor, op: Any, channel: Channel) -> Tensor:
    collective, world = channel.collective, matrix.shape[0]
    ordered = matrix.is_floating_point() and op_name(op) in ("min", "max")
    sent = to_ordered(matrix, largest=op_name(op) == "max") if ordered else matrix
    if matrix.device.type == "cpu":  # gloo's reduce_scatter takes four times as long as its all_reduce
        sent = sent if ordered else sent.clone(memory_format=torch.contiguous_format)
        collective.all_reduce(sent, engine_op(op))
        row = sent[collective.rank_in_group]
    else:
        row = torch.empty_like(sent[0])
        collective.reduce_scatter(row, list(sent), engine_op(op))
    if ordered:
        return from_ordered(row, matrix.dtype)
    return row / world if op == torch_op("mean") else row


def _exchange_rows(matrix: Tensor, channel: Channel) -> Tensor:
    raw = as_bytes(matrix).view(matrix.shape[0], -1)
    out = torch.empty_like(raw)
    channel.collective.all_to_all(list(out), list(raw))
    return out.view(matrix.dtype)


def _deal(flat: Tensor, group: list[int], tensors: list[Tensor], results: list[Any], world: int) -> None:
    """Cut this rank's row into the parts of its tensors."""
    parts = [tensors[i] for i in group]
    values = flat.to(parts[0].device, parts[0].dtype).split([part.numel() // world for part in parts])
    for i, value, part in zip(group, values, parts, strict=True):
        results[i] = value.reshape(part.shape[0] // world, *part.shape[1:]).clone()
