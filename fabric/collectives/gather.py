"""Gather trees of equal shapes from all ranks; sent as bytes, so every dtype is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.collectives.channel import to_tensors
from fabric.collectives.frames import buckets, pack, tree_call, unpack
from fabric.core.tree import CONSTANTS, flatten, unflatten

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.collectives.channel import Channel


def gather_tree(
    data: Any, channel: Channel, dst: int | None = None, *, async_op: bool = False, verb: str = "all_gather"
) -> Any:
    """Return the tree with every rank's leaves: of shape (world_size, *shape), on their original device.

    Args:
        data: A tensor, number, or nesting of them; equal structure, shapes and dtypes on all ranks,
            which must all make the call.
        channel: The group.
        dst: The only rank with the result; other ranks get None. None: all ranks get the result.
        async_op: Whether to return a `Handle` before large data are received.
        verb: The user's call, for messages.

    Raises:
        ArgumentTypeError: A leaf is neither tensor nor number.
        ConfigurationError: `dst` is not in the group; on all ranks.
        CollectiveMismatch: Ranks made different calls; raised on all of them.
        UsageError: This rank does not belong to the group.
    """
    leaves, spec = flatten(data, CONSTANTS)
    with channel.validating("all_gather" if dst is None else verb):
        tensors = to_tensors(leaves, channel.transport.device, verb.partition("(")[0])
        if dst is not None:
            channel.collective.group_rank_of(dst)
    world, groups, collective = channel.world_size, buckets(tensors, mixed=True), channel.collective
    receives = dst is None or collective.rank == dst
    raws = [pack([tensors[i] for i in group]).view(-1) for group in groups]
    works: list[Any] = []

    def allocate() -> list[Tensor]:
        nonlocal raws
        raws = [channel.transport.to_staging(raw) for raw in raws]
        return [raw.new_empty(world * receives, raw.numel()) for raw in raws]

    tables, allocated = channel.exchange_small(tree_call(verb, spec, tensors), raws, allocate)
    if tables is None:
        tables = allocated
        for table, raw in zip(allocated, raws, strict=True):
            if dst is None:
                works.append(collective.start_all_gather_flat(table.view(-1), raw))
            else:
                collective.gather(raw, list(table), dst)

    def finish() -> Any:
        for work in works:
            work.wait()
        if not receives:
            return None
        gathered: list[Any] = [None if t.nbytes else t.new_empty(world, *t.shape) for t in tensors]
        for group, table in zip(groups, tables, strict=True):
            parts = [tensors[i] for i in group]
            columns = unpack(table.to(parts[0].device), parts)
            for i, column, part in zip(group, columns, parts, strict=True):
                gathered[i] = column.reshape(world, *part.shape).data  # no view: a loop may write into it
        return unflatten(gathered, spec, data)

    if not async_op:
        return finish()
    from fabric.collectives.handle import Handle

    return Handle(verb, works, finish)
