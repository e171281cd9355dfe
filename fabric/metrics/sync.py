"""`compute_metrics`: the value that one process would compute which saw the data of all ranks.

Each rank sends what it holds as one object: small states ride in the frame, else they follow in one message.
Large states that can be reduced are only described there, and reduced: once for each rule.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.core.errors import CollectiveMismatch, UsageError
from fabric.core.tree import flatten, unflatten
from fabric.metrics.members import FOLDS, find, lent, repaired, updates_of
from fabric.plugins.collectives.channel import torch_op
from fabric.plugins.collectives.frames import PACK_LIMIT, call_of, draw, fold, join
from fabric.plugins.collectives.objects import Dumped, gather_dumped
from fabric.plugins.collectives.reduce import reduce_tree

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.metrics.members import Found, Member, State
    from fabric.plugins.collectives.channel import Channel

    Values = list[tuple[State, Any]]

_VERB = "compute_metrics"


class Told(NamedTuple):
    """All that one rank holds, as it travels."""

    updates: list[int]
    """How often each metric was updated."""
    leaders: list[int]
    """For each metric of each collection, whose states it shares by torchmetrics' guess; -1: no guess."""
    held: list[Any]
    """For each state a tensor, `Elsewhere`, `Entries`, or a list of objects; None: it was never updated."""


class Elsewhere(NamedTuple):
    """A large tensor that is reduced by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_cpu: bool


class Entries(NamedTuple):
    """A list of tensors: neighbours of one shape, dtype and device are stacked."""

    stacks: list[Tensor]


class Part(NamedTuple):
    """A state of a metric that some ranks updated."""

    place: int
    """Place of the metric among all."""
    member: Member
    state: State
    held: dict[int, Any]
    """What each of those ranks holds."""


def compute_metrics(metrics: Any, channel: Channel, row: int = 1) -> Any:
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
        row: How many ranks, one after the other, see the same data: those of a pipeline, or that share
            sequences.

    Raises:
        ArgumentTypeError: A leaf is no metric; or a state holds what cannot be pickled.
        CollectiveMismatch: Ranks have different metrics, or hold a state in different shapes; on all of them.
        UsageError: A metric holds the states of all ranks already (`sync()`), a MetricTracker has no step, or
            a MetricCollection has guessed compute groups that another rank shows to be wrong.
    """
    leaves, spec = flatten(metrics)
    values: Values = []
    with channel.refusing(_VERB):
        found = find(leaves, metrics)
        dumped = Dumped(_told(found, channel.world_size), _VERB) if channel.world_size > 1 else None
    updates = [0] * len(found.members)
    if dumped is not None:
        with torch.no_grad():
            told = gather_dumped(call_of(_VERB, draw(spec, found.drawn)), dumped, channel)
            told = told if row == 1 else _once_a_row(found, told, row)
            _check_guesses(found, told)
            values = _merged(_parts_of(found, told), told, channel)
        updates = [sum(counts) for counts in zip(*[one.updates for one in told], strict=True)]
    with lent(found, values, updates):
        results = [metric.compute() for metric in found.computed]
    return unflatten(results, spec, metrics)


def _told(found: Found, world: int) -> Told:
    """What this rank holds.

    Raises:
        ArgumentTypeError: A state holds what cannot be pickled.
    """
    told = Told([], [leader for group in found.groups for leader in _leaders(group)], [])
    known: dict[int, Any] = {}  # metrics of a compute group hold the same objects: these travel once
    size = 0
    for member in found.members:
        count = updates_of(member.metric)
        told.updates.append(count)
        for state in member.states:
            value = state.value if count else None
            if count and id(value) not in known:
                known[id(value)] = value, _sent(state, value)
                size += value.nbytes if state.rule in FOLDS and isinstance(value, torch.Tensor) else 0
            told.held.append(known[id(value)][1] if count else None)
    if world * size > PACK_LIMIT:
        described: dict[int, Elsewhere] = {}
        for place, state in enumerate([state for member in found.members for state in member.states]):
            value = told.held[place]
            if state.rule in FOLDS and isinstance(value, torch.Tensor):
                form = Elsewhere(tuple(value.shape), value.dtype, value.is_cpu)
                told.held[place] = described.setdefault(id(value), form)
    return told


def _sent(state: State, value: Any) -> Any:
    if isinstance(value, bool | int | float | complex):
        return torch.tensor(value)
    if isinstance(value, torch.Tensor):
        return value.detach()
    entries = list(value)
    if all([isinstance(entry, torch.Tensor) for entry in entries]):
        runs = groupby([e.detach() for e in entries], key=lambda e: (e.shape, e.dtype, e.device))
        return Entries([torch.stack(list(run)) for _, run in runs])
    Dumped(entries, _VERB, f"state {state.name!r} of {type(state.metric).__name__}")  # raises by name
    return entries


def _parts_of(found: Found, told: list[Told]) -> list[Part]:
    parts, at = [], 0
    for place, member in enumerate(found.members):
        for state in member.states:
            held = {rank: one.held[at] for rank, one in enumerate(told) if one.held[at] is not None}
            at += 1
            if held:
                parts.append(Part(place, member, state, held))
    return parts


def _once_a_row(found: Found, told: list[Told], size: int) -> list[Told]:
    """What ranks in rows hold, each metric only where it counts: with the last of a row to update it."""
    counted = [Told([], one.leaders, []) for one in told]
    at = 0
    for place, member in enumerate(found.members):
        end = at + len(member.states)
        chosen = {rank // size: rank for rank, one in enumerate(told) if one.updates[place]}  # the last
        for rank, (old, new) in enumerate(zip(told, counted, strict=True)):
            counts = chosen.get(rank // size) == rank
            new.updates.append(old.updates[place] if counts else 0)
            new.held.extend(old.held[at:end] if counts else [None] * (end - at))
        at = end
    return counted


def _merged(parts: list[Part], told: list[Told], channel: Channel) -> Values:
    """The states of all ranks as those of one process; the same on all ranks."""
    here: dict[Any, list[Part]] = {}
    there: dict[str, list[Part]] = {}
    others = []
    for part in parts:
        kinds = {type(value) for value in part.held.values()}
        if part.state.rule not in FOLDS or not kinds <= {torch.Tensor, Elsewhere}:
            others.append(part)
            continue
        _check_shapes(part)
        if Elsewhere in kinds:
            there.setdefault(part.state.rule, []).append(part)
        else:
            key = (part.state.rule, _dtype_of(part), _device_of(part, channel), *part.held)
            here.setdefault(key, []).append(part)
    values = [
        pair for (rule, _, device, *_), some in here.items() for pair in _folded_here(some, rule, device)
    ]
    for rule in FOLDS:
        values += _folded_there(there[rule], rule, channel) if rule in there else []
    # Last, since a metric's own reduction may raise, and others must not wait for this rank.
    made: dict[Any, Any] = {}
    gathered: Values = []
    for part in others:
        state = part.state
        key = (state.rule, id(state.call), _ids(part))
        if key not in made:
            made[key] = _gathered(part, told)
        gathered.append((state, made[key]))
    return values + repaired(gathered, {id(part.state.metric): len(part.held) for part in others})


def _folded_here(parts: list[Part], rule: str, device: torch.device) -> Values:
    """States of one rule, dtype and device, from the same ranks, reduced from everybody's data."""
    unique, dtype = _unique(parts), _dtype_of(parts[0])
    rows = [join([part.held[rank].to(device, dtype) for part in unique.values()]) for rank in parts[0].held]
    total = fold(rows, torch_op(rule)).to(dtype)
    shapes = [next(iter(part.held.values())).shape for part in unique.values()]
    columns = total.split([math.prod(shape) for shape in shapes])
    return _dealt(parts, unique, [c.view(shape) for c, shape in zip(columns, shapes, strict=True)])


def _folded_there(parts: list[Part], rule: str, channel: Channel) -> Values:
    """Large states of one rule, by a reduction."""
    unique, me, own = _unique(parts), channel.collective.rank_in_group, []
    for part in unique.values():
        shape, dtype, device = (
            next(iter(part.held.values())).shape,
            _dtype_of(part),
            _device_of(part, channel),
        )
        if me in part.held:
            own.append(_sent(part.state, part.state.value).to(device, dtype, copy=True))
        else:
            own.append(torch.full(shape, _neutral(rule, dtype), dtype=dtype, device=device))
    return _dealt(parts, unique, reduce_tree(own, rule, channel, label=_VERB))


def _ids(part: Part) -> tuple[Any, ...]:
    return tuple([(rank, id(value)) for rank, value in part.held.items()])


def _unique(parts: list[Part]) -> dict[Any, Part]:
    """One of those that hold the same: metrics of a compute group share states."""
    return {_ids(part): part for part in reversed(parts)}


def _dealt(parts: list[Part], unique: dict[Any, Part], results: list[Tensor]) -> Values:
    made = dict(zip(unique, results, strict=True))
    return [(part.state, made[_ids(part)].to(part.state.device)) for part in parts]


def _dtype_of(part: Part) -> torch.dtype:
    dtype: torch.dtype = reduce(torch.promote_types, [value.dtype for value in part.held.values()])
    return dtype


def _device_of(part: Part, channel: Channel) -> torch.device:
    """Where all ranks have the state, or can bring it."""
    on_host = all([value.is_cpu for value in part.held.values()])
    return torch.device("cpu") if on_host else channel.wire.device


def _neutral(rule: str, dtype: torch.dtype) -> Any:
    if rule == "sum":
        return 0
    if dtype is torch.bool:
        return rule == "min"
    if dtype.is_floating_point:
        return float("inf") if rule == "min" else -float("inf")
    limits = torch.iinfo(dtype)
    return limits.max if rule == "min" else limits.min


def _gathered(part: Part, told: list[Told]) -> Any:
    """A state that needs every rank's part: joined, stacked, averaged, or given to its own reduction."""
    state, held, device = part.state, part.held, part.state.device
    if not all([isinstance(value, torch.Tensor) for value in held.values()]):
        entries = [entry for value in held.values() for entry in _entries(value, device)]
        return state.call(entries) if state.call is not None and len(held) > 1 else entries
    tensors = [value.to(device) for value in held.values()]
    if len(tensors) == 1:
        return tensors[0]
    if state.rule == "cat":
        return torch.cat([tensor if tensor.dim() else tensor[None] for tensor in tensors])
    _check_shapes(part)
    if state.rule == "mean":
        return _mean(tensors, [told[rank].updates[part.place] for rank in held])
    stacked = torch.stack(tensors)
    return stacked if state.call is None else state.call(stacked)


def _entries(value: Any, device: torch.device) -> list[Any]:
    if isinstance(value, Entries):
        return [entry for stack in value.stacks for entry in stack.to(device).unbind(0)]
    return [value.to(device)] if isinstance(value, torch.Tensor) else value


def _mean(tensors: list[Tensor], counts: list[int]) -> Tensor:
    first = tensors[0]
    if all([torch.equal(tensor, first) for tensor in tensors]):
        return first  # not of rounding; and integers have no other mean
    dtype = torch.complex128 if first.is_complex() else torch.float64
    scaled = [tensor.to(dtype) * count for tensor, count in zip(tensors, counts, strict=True)]
    mean = fold(scaled, torch_op("sum")) / sum(counts)
    return mean.to(
        first.dtype if first.is_floating_point() or first.is_complex() else torch.get_default_dtype()
    )


def _check_shapes(part: Part) -> None:
    shapes = {rank: tuple(value.shape) for rank, value in part.held.items()}
    if len(set(shapes.values())) > 1:
        table = ", ".join([f"rank {rank}: {list(shape)}" for rank, shape in shapes.items()])
        raise CollectiveMismatch(
            f"compute_metrics: state {part.state.name!r} of {part.member.name} has different shapes on ranks "
            f"({table}). Construct the metric alike on all ranks, and give it data of one kind."
        )


def _leaders(group: Any) -> list[int]:
    """For each metric of a collection, the first of its compute group, where torchmetrics guessed these."""
    places = {name: place for place, name in enumerate(group._modules)}
    leaders = [-1] * len(places)
    if group._enable_compute_groups is True and group._groups_checked:
        for names in group._groups.values():
            for name in names:
                leaders[places[name]] = places[names[0]]
    return leaders


def _check_guesses(found: Found, told: list[Told]) -> None:
    """Refuse a collection in which one rank updated a metric in place of another that is not the same.

    Raises:
        UsageError: On all ranks alike.
    """
    places = {id(member.metric): place for place, member in enumerate(found.members)}
    start = 0
    for group in found.groups:
        names = list(group._modules)
        guesses = [one.leaders[start : start + len(names)] for one in told]
        start += len(names)
        for at, name in enumerate(names):
            for rank, guess in enumerate(guesses):
                leader, updated = guess[at], told[rank].updates[places[id(group._modules[name])]]
                apart = [r for r, other in enumerate(guesses) if other[at] not in (-1, other[leader])]
                if leader not in (-1, at) and updated > 1 and apart:
                    raise UsageError(
                        f"A MetricCollection updated only {names[leader]!r} in place of {name!r} on rank "
                        f"{rank}: their states were equal by chance after the first update there (on rank "
                        f"{apart[0]}, not). The rest of rank {rank}'s data is lost for {name!r}. Write "
                        "MetricCollection(..., compute_groups=False), or list the groups yourself."
                    )
