"""Collectives on trees whose leaves are split along dim 0, into one part per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.collectives.channel import check_parts, op_name, reducible, to_tensors, torch_op
from fabric.collectives.frames import buckets, fold, pack, tree_call, unpack
from fabric.collectives.objects import broadcast_object, metadata_of, receive
from fabric.collectives.reduce import foldable, wire_dtype
from fabric.core.tree import CONSTANTS, flatten, unflatten

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.collectives.channel import Channel


def reduce_scatter_tree(data: Any, op: Any, channel: Channel, *, label: str | None = None) -> Any:
    """Return this rank's part of the reduced data: leaves of shape (n / world_size, ...) for (n, ...).

    Args:
        data: Equal structure, shapes and dtypes on all ranks, which must all make the call. Not modified.
        op: As for `reduce_tree`.
        channel: The group.
        label: The user's call, for messages, if not a reduce_scatter.

    Raises:
        ConfigurationError: The first dimension of a leaf does not divide by the number of ranks.
        ArgumentTypeError: As for `reduce_tree`.
        CollectiveMismatch: Ranks made different calls; raised on all of them.
    """
    world, rank = channel.world_size, channel.collective.rank_in_group
    leaves, spec = flatten(data, CONSTANTS)
    with channel.validating("reduce_scatter"):
        op = torch_op("sum" if op is None else op)
        tensors = reducible(leaves, op, channel.transport.device, "reduce_scatter")
        check_parts(tensors, world, "reduce_scatter")
    if world == 1:
        return unflatten([t.detach().clone() for t in tensors], spec, data)
    wide = [t.detach().to(wire_dtype(t.dtype, op)) for t in tensors]
    groups = buckets(wide)
    sent = [pack([wide[i] for i in group], world).view(wide[group[0]].dtype) for group in groups]
    call = tree_call(label or f"reduce_scatter({op_name(op)})", spec, tensors)
    tables, _ = channel.exchange_small(call, sent, may=foldable(op))
    results = [t.new_empty(t.shape[0] // world, *t.shape[1:]) for t in tensors]
    for index, (group, matrix) in enumerate(zip(groups, sent, strict=True)):
        if tables is None:
            row = _reduce_row(channel.transport.to_staging(matrix), op, channel)
        else:
            row = fold(tables[index].view(world, world, -1)[:, rank], op)
        values = row.to(matrix.device).split([results[i].numel() for i in group])
        for i, value in zip(group, values, strict=True):
            results[i].view(-1).copy_(value)
    return unflatten(results, spec, data)


def all_to_all_tree(data: Any, channel: Channel, *, verb: str = "all_to_all") -> Any:
    """Send part i of each leaf to rank i of the group; return the tree with rank r's part as part r.

    Args:
        data: Equal structure, shapes and dtypes on all ranks, which must all make the call. Not modified.
        channel: The group.
        verb: The user's call, for messages.

    Raises:
        ConfigurationError: The first dimension of a leaf does not divide by the number of ranks.
        ArgumentTypeError: A leaf is not a tensor.
        CollectiveMismatch: Ranks made different calls; raised on all of them.
    """
    world, rank = channel.world_size, channel.collective.rank_in_group
    leaves, spec = flatten(data, CONSTANTS)
    with channel.validating("all_to_all"):
        tensors = to_tensors(leaves, channel.transport.device, "all_to_all")
        check_parts(tensors, world, "all_to_all")
    groups = buckets(tensors, mixed=True)
    sent = [pack([tensors[i] for i in group], world) for group in groups]
    tables, _ = channel.exchange_small(tree_call(verb, spec, tensors), sent)
    results = [torch.empty_like(t) if not t.numel() else t for t in tensors]
    for index, (group, matrix) in enumerate(zip(groups, sent, strict=True)):
        if tables is None:
            staged = channel.transport.to_staging(matrix)
            rows = torch.empty_like(staged)
            channel.collective.all_to_all(list(rows), list(staged))
        else:
            rows = tables[index].view(world, world, -1)[:, rank].contiguous()
        parts = [tensors[i] for i in group]
        for i, column in zip(group, unpack(rows.to(matrix.device), parts, world), strict=True):
            results[i] = column.reshape(tensors[i].shape).data  # no view: a loop may write into it
    return unflatten(results, spec, data)


def scatter_tree(data: Any, src: int, channel: Channel) -> Any:
    """Return this rank's part of `src`'s tree: its leaves are split along dim 0 into one part per rank.

    Args:
        data: A tensor, or nesting of them; that of ranks other than `src` is ignored.
        src: Global rank that sends.
        channel: The group.

    Returns:
        The tree with leaves of shape (n / world_size, ...) for leaves of (n, ...).

    Raises:
        CollectiveMismatch: Ranks made different calls, or a leaf of `src` is not a tensor or does not divide
            by the number of ranks; raised on all of them.
    """
    world, device, verb = channel.world_size, channel.transport.device, f"scatter(src={src})"
    tensors: list[Tensor] = []
    header: Any = None
    if channel.collective.rank == src or world == 1:
        with channel.validating(verb):
            leaves, spec = flatten(data, CONSTANTS)
            tensors = [t.detach().resolve_conj().resolve_neg() for t in to_tensors(leaves, device, verb)]
            check_parts(tensors, world, verb)
        if world == 1:
            return unflatten([t.clone() for t in tensors], spec, data)
        parts = [metadata_of(t)._replace(shape=(t.shape[0] // world, *t.shape[1:])) for t in tensors]
        header = unflatten([None] * len(tensors), spec, data), spec, parts
    like, spec, metadata = broadcast_object(header, verb, src, channel)

    def scatter_bucket(raw: Tensor, bucket: list[int]) -> None:
        rows = list(pack([tensors[i] for i in bucket], world)) if tensors else []
        channel.collective.scatter(raw, [channel.transport.to_staging(row) for row in rows], src)

    return unflatten(receive(metadata, channel, scatter_bucket), spec, like)


def _reduce_row(matrix: Tensor, op: Any, channel: Channel) -> Tensor:
    collective = channel.collective
    if matrix.device.type == "cpu":  # gloo's reduce_scatter takes four times as long as its all_reduce
        sent = matrix.clone(memory_format=torch.contiguous_format)
        return collective.all_reduce(sent, op)[collective.rank_in_group]
    return collective.reduce_scatter(torch.empty_like(matrix[0]), list(matrix), op)
