"""`compute_metrics`: the value that one process would compute which saw the data of all ranks.

The states of all metrics travel together: in one message if they are small (they ride in the frame), else in
one for their sizes, one for their data, and for large ones a reduction for each rule and dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.core.errors import FabricError
from fabric.core.tree import flatten, unflatten
from fabric.metrics.members import find, lent
from fabric.metrics.merge import (
    alike_in_rows,
    check_guesses,
    folded_here,
    folded_there,
    jobs_of,
    merged_lists,
    once_a_row,
    parts_of,
    totals,
)
from fabric.metrics.wire import Reader, aligned, fill, fold_size, from_words, pack, size_of, to_words
from fabric.plugins.collectives.channel import PACK_LIMIT
from fabric.plugins.collectives.frames import call_of, draw
from fabric.plugins.collectives.gather import gather_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.metrics.members import Found
    from fabric.metrics.merge import Values
    from fabric.metrics.wire import Layout, Packed
    from fabric.plugins.collectives.channel import Channel

_VERB = "compute_metrics"


class Rows(NamedTuple):
    """Ranks one after the other that see the same data: those of a pipeline, or that share sequences."""

    size: int
    """Of each."""
    across: Channel
    """The ranks at this rank's place in all rows."""


def compute_metrics(metrics: Any, channel: Channel, rows: Rows | None = None) -> Any:
    """The values of `metrics` over all ranks, the same on all of them; the metrics keep this rank's states.

    How states become one, in the order of ranks: sums, minima and maxima are reduced, and lists are joined. A
    mean is weighted by the ranks' numbers of updates, as torchmetrics weights batches in `forward` (its own
    synchronisation does not). Tensors without a reduction are stacked, and a metric's own reduction gets the
    stack, or the joined list. A rank that never updated a metric is left out; where only one did, its states
    are taken as they are. The metric's own settings of synchronisation do not matter here.

    Of a row, the last rank that updated a metric stands for all: whether each of them saw the data (a model
    whose output comes to all) or only one (the last stage of a pipeline), they count once.

    Args:
        metrics: A torchmetrics Metric, MetricCollection or MetricTracker (its current step), or any nesting
            of them; alike on all ranks of the group, which must all make the call.
        channel: The group.
        rows: Of the group, where ranks see the same data.

    Raises:
        ArgumentTypeError: A leaf is no metric; or a state holds what cannot be pickled.
        CollectiveMismatch: Ranks have different metrics, or hold a state in different shapes; on all of them.
        UsageError: A metric holds the states of all ranks already (`sync()`), a MetricTracker has no step, or
            a MetricCollection has guessed compute groups that another rank shows to be wrong.
    """
    world = channel.world_size
    leaves, spec = flatten(metrics)
    values: Values = []
    try:
        found = find(leaves, metrics)
        packed = pack(found) if world > 1 else None
    except FabricError as error:
        channel.refuse(_VERB, error)
        raise
    updates = [0] * len(found.members)
    if packed is not None:
        with torch.no_grad():
            layouts, values = _exchange(found, packed, draw(spec, found.drawn), channel, rows)
        updates = totals(layouts)
    with lent(found, values, updates):
        results = [metric.compute() for metric in found.computed]
    return unflatten(results, spec, metrics)


def _exchange(
    found: Found, packed: Packed, what: str, channel: Channel, rows: Rows | None
) -> tuple[list[Layout], Values]:
    """What every rank holds, and the states that follow from it."""
    world, layout = channel.world_size, packed.layout
    size = size_of(layout.runs)
    rides = world * size <= PACK_LIMIT
    message = to_words(layout._replace(rides=int(rides)))
    if rides and size:
        head = message.numel()
        message = torch.cat([message, message.new_zeros(size)])
        fill(message[head:], packed)
    said = [from_words(raw, found) for raw in gather_bytes(call_of(_VERB, what), message, channel)]
    all_layouts = [one for one, _ in said]
    layouts = all_layouts if rows is None else once_a_row(found, all_layouts, rows.size)
    check_guesses(found, layouts)
    if all([one.rides for one in layouts]):
        readers = [Reader(one.runs, data) for one, data in said]
        parts = parts_of(found, layouts)
        return layouts, merged_lists(parts, layouts, readers) + folded_here(jobs_of(parts, layouts), readers)
    if rows is not None and alike_in_rows(all_layouts, rows.size):
        # Each rank of a row holds all of the row's data: large ones need not go to all ranks.
        channel, layouts = rows.across, all_layouts[channel.collective.rank_in_group % rows.size :: rows.size]
        if channel.world_size == 1:
            return layouts, []
    return layouts, _merged(found, packed, layouts, channel)


def _merged(found: Found, packed: Packed, layouts: list[Layout], channel: Channel) -> Values:
    """The states, by messages of their own."""
    parts = parts_of(found, layouts)
    jobs = jobs_of(parts, layouts)
    device = _common_device(layouts, channel)
    folded = channel.world_size * max([fold_size(one.runs) for one in layouts]) <= PACK_LIMIT
    readers = _gather(packed, layouts, folded, device, channel)
    if folded:
        values = folded_here(jobs, readers)
    else:
        place, runs = channel.collective.rank_in_group, packed.layout.runs
        mine = Reader(runs, fill(_buffer(size_of(runs), device), packed))
        values = folded_there(jobs, mine, place, device, channel)
    # Last, since a metric's own reduction may raise, and others must not wait for this rank.
    return values + merged_lists(parts, layouts, readers)


def _gather(
    packed: Packed, layouts: list[Layout], folded: bool, device: torch.device, channel: Channel
) -> list[Reader]:
    """Everybody's data, by one collective as long as the longest needs."""
    length = aligned(max([size_of(one.runs, folded) for one in layouts]))
    sent = fill(_buffer(length, device), packed, folded)
    out = sent.new_empty(channel.world_size * length)
    if length:
        channel.collective.all_gather_flat(out, sent)
    rows = out.view(channel.world_size, -1)
    return [Reader(one.runs, row, folded) for one, row in zip(layouts, rows, strict=True)]


def _common_device(layouts: list[Layout], channel: Channel) -> torch.device:
    """Where all ranks send from: a rank without data cannot know where the others have theirs."""
    host = torch.device("cpu")
    on_host = all([one.on_host for one in layouts]) and host.type in channel.wire.sendable
    return host if on_host else channel.wire.ready(torch.empty(0, device=channel.wire.device)).device


def _buffer(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)
