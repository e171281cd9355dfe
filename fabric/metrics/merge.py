"""The states of all ranks as those of one process: computed alike on every rank, in the order of ranks.

A rank that never updated a metric is left out. Called by sync.py.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.core.errors import CollectiveMismatch, UsageError
from fabric.metrics.members import FOLDS
from fabric.metrics.repairs import repaired
from fabric.metrics.wire import LIST, OBJECTS, TENSOR, dtype_of, unpickled
from fabric.plugins.collectives.reduce import fold, reduce_tree

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.metrics.members import Found, Member, State
    from fabric.metrics.wire import Held, Layout, Reader
    from fabric.plugins.collectives.channel import Channel

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

Values = list[tuple["State", Any]]


class Part(NamedTuple):
    """A state of a metric that some ranks updated."""

    place: int
    """Place of the metric among all."""
    member: Member
    state: State
    held: dict[int, Held]
    """What each of those ranks holds."""
    folded: bool
    """Whether a reduction gives the result."""


class Job(NamedTuple):
    """States that are folded together: of one rule and dtype, from the same ranks."""

    rule: str
    dtype: torch.dtype
    ranks: tuple[int, ...]
    states: dict[tuple[int, ...], list[State]]
    """By the runs in which the ranks hold them: compute groups hold several states in one."""
    shapes: dict[tuple[int, ...], tuple[int, ...]]

    def places(self, index: int) -> list[int]:
        """The runs of the rank that is `index`-th among the contributing."""
        return [sources[index] for sources in self.states]


def parts_of(found: Found, layouts: list[Layout]) -> list[Part]:
    """Every state of every metric that some rank updated."""
    parts, at = [], 0
    for place, member in enumerate(found.members):
        for state in member.states:
            held = {rank: one for rank, layout in enumerate(layouts) if (one := layout.held[at]) is not None}
            at += 1
            if held:
                tensors = state.rule in FOLDS and all([one.kind == TENSOR for one in held.values()])
                parts.append(Part(place, member, state, held, tensors))
    return parts


def once_a_row(found: Found, layouts: list[Layout], size: int) -> list[Layout]:
    """The layouts of ranks in rows, each metric only where it counts: with the last of a row to update it.

    Args:
        found: All metrics of the call.
        layouts: Of all ranks.
        size: Ranks of a row, which have seen the same data, or some of them none.
    """
    counted = [layout._replace(updates=[], held=[]) for layout in layouts]
    at = 0
    for place, member in enumerate(found.members):
        end = at + len(member.states)
        chosen = {rank // size: rank for rank, one in enumerate(layouts) if one.updates[place]}  # the last
        for rank, (old, new) in enumerate(zip(layouts, counted, strict=True)):
            counts = chosen.get(rank // size) == rank
            new.updates.append(old.updates[place] if counts else 0)
            new.held.extend(old.held[at:end] if counts else [None] * (end - at))
        at = end
    return counted


def alike_in_rows(layouts: list[Layout], size: int) -> bool:
    """Whether the ranks of each row hold tensors of the same shapes, of as many updates."""
    return all([layout == layouts[rank - rank % size] for rank, layout in enumerate(layouts)])


def totals(layouts: list[Layout]) -> list[int]:
    """How often each metric was updated, on all ranks together."""
    return [sum(counts) for counts in zip(*[layout.updates for layout in layouts], strict=True)]


def check_guesses(found: Found, layouts: list[Layout]) -> None:
    """Refuse a collection in which one rank updated a metric in place of another that is not the same.

    Raises:
        UsageError: On all ranks alike.
    """
    places = {id(member.metric): place for place, member in enumerate(found.members)}
    start = 0
    for group in found.groups:
        names = list(group._modules)
        guesses = [layout.leaders[start : start + len(names)] for layout in layouts]
        start += len(names)
        if all([guess == guesses[0] for guess in guesses]):
            continue
        for at, name in enumerate(names):
            updated = [layout.updates[places[id(group._modules[name])]] for layout in layouts]
            for rank, guess in enumerate(guesses):
                if guess[at] not in (-1, at) and updated[rank] > 1:
                    _check_guess(names, at, guess[at], rank, guesses)


def merged_lists(parts: list[Part], layouts: list[Layout], readers: list[Reader]) -> Values:
    """The states that need every rank's part: lists; tensors that are stacked, joined, averaged, or given to
    the metric's own reduction.
    """
    values: Values = []
    made: dict[Any, Any] = {}
    ranks: dict[int, int] = {}
    for part in parts:
        if part.folded:
            continue
        state = part.state
        key = (state.rule, id(state.call), tuple([(rank, id(one)) for rank, one in part.held.items()]))
        if key not in made:
            made[key] = _gathered(part, layouts, readers)
        values.append((state, made[key]))
        ranks[id(state.metric)] = len(part.held)
    return repaired(values, ranks)


def jobs_of(parts: list[Part], layouts: list[Layout]) -> list[Job]:
    """The reductions that give all other states; the same on all ranks.

    Raises:
        CollectiveMismatch: Ranks hold a state in different shapes; on all of them.
    """
    jobs: dict[Any, Job] = {}
    for part in parts:
        if not part.folded:
            continue
        ranks = tuple(part.held)
        sources = tuple([one.runs[0] for one in part.held.values()])
        runs = [layouts[rank].runs[place] for rank, place in zip(ranks, sources, strict=True)]
        dtype = dtype_of(runs[0])
        if runs.count(runs[0]) != len(runs):
            _check_shapes(part, layouts)
            dtype = reduce(torch.promote_types, [dtype_of(run) for run in runs])
        key = (FOLDS.index(part.state.rule), str(dtype), ranks)
        if key not in jobs:
            jobs[key] = Job(part.state.rule, dtype, ranks, {}, {})
        jobs[key].states.setdefault(sources, []).append(part.state)
        jobs[key].shapes[sources] = runs[0].shape
    return [jobs[key] for key in sorted(jobs)]


def folded_here(jobs: list[Job], readers: list[Reader]) -> Values:
    """The results of the jobs, from everybody's data."""
    values: Values = []
    for job in jobs:
        rows = [readers[rank].row(job.places(i)).to(job.dtype) for i, rank in enumerate(job.ranks)]
        values += _dealt(job, fold(torch.stack(rows), _OPS[job.rule]))
    return values


def folded_there(
    jobs: list[Job], reader: Reader, rank: int, device: torch.device, channel: Channel
) -> Values:
    """The results of the jobs, by one reduction for each rule and dtype."""
    rows: dict[str, dict[torch.dtype, list[Tensor]]] = {}
    for job in jobs:
        if rank in job.ranks:
            row = reader.row(job.places(job.ranks.index(rank))).to(job.dtype)
        else:
            numel = sum([math.prod(shape) for shape in job.shapes.values()])
            row = torch.full((numel,), _neutral(job), dtype=job.dtype, device=device)
        rows.setdefault(job.rule, {}).setdefault(job.dtype, []).append(row)
    values: Values = []
    for rule, parts in rows.items():
        joined = {str(dtype): torch.cat(some) for dtype, some in parts.items()}
        reduced = reduce_tree(joined, rule, channel, label="compute_metrics")
        for dtype, some in parts.items():
            mine = [job for job in jobs if (job.rule, job.dtype) == (rule, dtype)]
            columns = reduced[str(dtype)].split([row.numel() for row in some])
            for job, column in zip(mine, columns, strict=True):
                values += _dealt(job, column)
    return values


def _check_guess(names: list[str], at: int, leader: int, rank: int, guesses: list[list[int]]) -> None:
    apart = [other for other, guess in enumerate(guesses) if guess[at] != -1 and guess[at] != guess[leader]]
    if apart:
        raise UsageError(
            f"A MetricCollection updated only {names[leader]!r} in place of {names[at]!r} on rank {rank}: "
            f"their states were equal by chance after the first update there (on rank {apart[0]}, not). "
            f"The rest of rank {rank}'s data is lost for {names[at]!r}. Write MetricCollection(..., "
            "compute_groups=False), or list the groups yourself."
        )


def _gathered(part: Part, layouts: list[Layout], readers: list[Reader]) -> Any:
    state, held, device = part.state, part.held, part.state.device
    if any([one.kind != TENSOR for one in held.values()]):
        entries = [entry for rank, one in held.items() for entry in _entries(one, readers[rank], device)]
        return state.call(entries) if state.call is not None and len(held) > 1 else entries
    tensors = [readers[rank].run(one.runs[0])[0].to(device) for rank, one in held.items()]
    if len(tensors) == 1:
        return tensors[0]
    if state.rule == "cat":
        return torch.cat([tensor if tensor.dim() else tensor[None] for tensor in tensors])
    _check_shapes(part, layouts)
    if state.rule == "mean":
        return _mean(tensors, [layouts[rank].updates[part.place] for rank in held])
    stacked = torch.stack(tensors)
    return stacked if state.call is None else state.call(stacked)


def _mean(tensors: list[Tensor], counts: list[int]) -> Tensor:
    first = tensors[0]
    if all([torch.equal(tensor, first) for tensor in tensors]):
        return first  # not of rounding; and integers have no other mean
    dtype = torch.complex128 if first.is_complex() else torch.float64
    scaled = [tensor.to(dtype) * count for tensor, count in zip(tensors, counts, strict=True)]
    mean = fold(torch.stack(scaled), _OPS["sum"]) / sum(counts)
    return mean.to(
        first.dtype if first.is_floating_point() or first.is_complex() else torch.get_default_dtype()
    )


def _entries(held: Held, reader: Reader, device: torch.device) -> list[Any]:
    if held.kind == OBJECTS:
        return unpickled(reader, held)
    runs = [reader.run(place).to(device) for place in held.runs]
    return [entry for run in runs for entry in run.unbind(0)] if held.kind == LIST else [runs[0][0]]


def _check_shapes(part: Part, layouts: list[Layout]) -> None:
    shapes = {rank: layouts[rank].runs[one.runs[0]].shape for rank, one in part.held.items()}
    if len(set(shapes.values())) > 1:
        table = ", ".join([f"rank {rank}: {list(shape)}" for rank, shape in shapes.items()])
        raise CollectiveMismatch(
            f"compute_metrics: state {part.state.name!r} of {part.member.name} has different shapes on ranks "
            f"({table}). Construct the metric alike on all ranks, and give it data of one kind."
        )


def _dealt(job: Job, total: Tensor) -> Values:
    """The states' parts of a result, where they belong."""
    places = {id(state): state.device for states in job.states.values() for state in states}
    devices = set(places.values())
    total = total.to(job.dtype)
    if len(devices) == 1:
        total = total.to(devices.pop())
    shapes = list(job.shapes.values())
    columns = total.split([math.prod(shape) for shape in shapes])
    return [
        (state, value if value.device == places[id(state)] else value.to(places[id(state)]))
        for column, shape, states in zip(columns, shapes, job.states.values(), strict=True)
        for value in [column.view(shape)]
        for state in states
    ]


def _neutral(job: Job) -> Any:
    if job.rule == "sum":
        return 0
    if job.dtype is torch.bool:
        return job.rule == "min"
    if job.dtype.is_floating_point:
        return float("inf") if job.rule == "min" else -float("inf")
    limits = torch.iinfo(job.dtype)
    return limits.max if job.rule == "min" else limits.min
