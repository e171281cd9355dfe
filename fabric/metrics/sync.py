"""`compute_metrics`: the value that one process would compute which saw the data of all ranks.

Each rank sends its states as one object: small ones in the frame, others in one message after it.
Large states that can be reduced are only described there, and reduced: once for each rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)
from torchmetrics.wrappers import MetricTracker
from torchmetrics.wrappers.abstract import WrapperMetric

from fabric.collectives.frames import PACK_LIMIT, call_of, fold, format_tree, join
from fabric.collectives.objects import PickledObject, gather_pickled
from fabric.core.errors import ArgumentTypeError, UsageError
from fabric.core.tree import flatten, iter_paths, unflatten
from fabric.metrics import joined
from fabric.metrics.joined import FoundStates, Member, OnOtherRank, State, StateSlice, Told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fabric.collectives.channel import Channel

    Values = list[tuple[State, Any]]

_VERB = "compute_metrics"
_FOLDS = {
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
}
"""Rules that a reduction over ranks can carry out; all others need every rank's part."""
_RULES = {
    id(dim_zero_sum): "sum",
    id(dim_zero_min): "min",
    id(dim_zero_max): "max",
    id(dim_zero_mean): "mean",
    id(dim_zero_cat): "cat",
    id(None): "none",
}
"""By id: a user's callable need not be hashable."""
_RUNNING_COUNT = "_num_vals_seen"


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
    with channel.validating(_VERB):
        found = _find(leaves, metrics)
        pickled = (
            PickledObject(_local_states(found, channel.world_size), _VERB) if channel.world_size > 1 else None
        )
    updates = [0] * len(found.members)
    if pickled is not None:
        with torch.no_grad():
            told = gather_pickled(
                call_of(_VERB, format_tree(spec, found.drawn)), pickled, channel, copies=False
            )
            if row > 1:
                _once_a_row(told, row)
            _check_guesses(found, told)
            values = _merged(_parts_of(found, told), told, channel)
        updates = [sum(counts) for counts in zip(*[one.updates for one in told], strict=True)]
    with _lent(found, values, updates):
        results = [metric.compute() for metric in found.computed]
    return unflatten(results, spec, metrics)


def _local_states(found: FoundStates, world: int) -> Told:
    """Return the states of metrics that this rank holds.

    Raises:
        ArgumentTypeError: A state holds what cannot be pickled.
    """
    told = Told([], [_leaders(group) for group in found.groups], [])
    made: dict[int, Any] = {}
    large: dict[int, OnOtherRank] = {}
    size = 0
    for member in found.members:
        count = updates_of(member.metric)
        told.updates.append(count)
        some: list[Any] = []
        for state in member.states if count else []:
            value = _value(state)
            if id(value) not in made:
                sent = made[id(value)] = _sent(state, value)
                if state.rule in _FOLDS and isinstance(sent, torch.Tensor):
                    large[id(sent)] = OnOtherRank(tuple(sent.shape), sent.dtype, sent.is_cpu)
                    size += sent.nbytes
            some.append(made[id(value)])
        told.held.append(some)
    if world * size > PACK_LIMIT:
        for some in told.held:
            some[:] = [large.get(id(sent), sent) for sent in some]
    return told


def _sent(state: State, value: Any) -> Any:
    if isinstance(value, bool | int | float | complex):
        return torch.tensor(value)
    if isinstance(value, torch.Tensor):
        return value.detach()
    entries = [entry.detach() if isinstance(entry, torch.Tensor) else entry for entry in value]
    if not all([isinstance(entry, torch.Tensor) for entry in entries]):
        PickledObject(
            entries, _VERB, f"state {state.name!r} of {type(state.metric).__name__}"
        )  # raises by name
    return entries


def _parts_of(found: FoundStates, told: list[Told]) -> list[StateSlice]:
    parts: dict[Any, StateSlice] = {}
    for place, member in enumerate(found.members):
        for at, state in enumerate(member.states):
            held = {rank: one.held[place][at] for rank, one in enumerate(told) if one.held[place]}
            key = (state.rule, id(state.call), *[(rank, id(value)) for rank, value in held.items()])
            if key in parts:
                parts[key].states.append(state)
            elif held:
                parts[key] = StateSlice(place, member, [state], held)
    return list(parts.values())


def _once_a_row(told: list[Told], size: int) -> None:
    """Leave each metric only with the last rank of a row to have updated it, which counts."""
    for place in range(len(told[0].updates)):
        chosen = {rank // size: rank for rank, one in enumerate(told) if one.updates[place]}  # the last
        for rank, one in enumerate(told):
            if chosen.get(rank // size) != rank:
                one.updates[place], one.held[place] = 0, []


def _value(state: State) -> Any:
    """Return the value of a state on this rank: a tensor, or a list."""
    return getattr(state.metric, state.name)


def _device(state: State) -> torch.device:
    """Return the device of the state on this rank."""
    value = _value(state)
    if not isinstance(value, torch.Tensor):
        first = next(iter(value), None) if isinstance(value, Iterable) else None
        if not isinstance(first, torch.Tensor):
            on_host = state.metric.compute_on_cpu and first is None
            return torch.device("cpu") if on_host else state.metric.device
        value = first
    return value.device


def _common_dtype(part: StateSlice) -> torch.dtype:
    dtype: torch.dtype = reduce(torch.promote_types, [value.dtype for value in part.held.values()])
    return dtype


def _common_device(part: StateSlice, channel: Channel) -> torch.device:
    """Return the device that holds the state on all ranks, or to which all of them can copy it."""
    on_host = all([value.is_cpu for value in part.held.values()])
    return torch.device("cpu") if on_host else channel.transport.device


def _given(part: StateSlice, value: Tensor) -> Values:
    """The merged value for each of the states, where this rank keeps it."""
    return [(state, value.to(_device(state))) for state in part.states]


def _merged(parts: list[StateSlice], told: list[Told], channel: Channel) -> Values:
    """The states of all ranks as those of one process; the same on all ranks."""
    here: dict[Any, list[StateSlice]] = {}
    there: dict[str, list[StateSlice]] = {}
    others = []
    for part in parts:
        rule, kinds = part.states[0].rule, {type(value) for value in part.held.values()}
        if rule not in _FOLDS or not kinds <= {torch.Tensor, OnOtherRank}:
            others.append(part)
            continue
        if len({value.shape for value in part.held.values()}) > 1:
            joined.check_shapes(part)
        if OnOtherRank in kinds:
            there.setdefault(rule, []).append(part)
        else:
            here.setdefault(
                (rule, _common_dtype(part), _common_device(part, channel), *part.held), []
            ).append(part)
    values: Values = []
    for (rule, dtype, device, *_), some in here.items():
        values += _folded_here(some, rule, dtype, device)
    for rule in _FOLDS:
        values += _folded_there(there[rule], rule, channel) if rule in there else []
    # Last, since a metric's own reduction may raise, and others must not wait for this rank.
    gathered: Values = []
    for part in others:
        value = joined.gathered(part, told, _device(part.states[0]))
        gathered += [(state, value) for state in part.states]
    ranks = {id(state.metric): len(part.held) for part in others for state in part.states}
    return values + joined.repaired(gathered, ranks) if gathered else values


def _folded_here(parts: list[StateSlice], rule: str, dtype: torch.dtype, device: torch.device) -> Values:
    """States of one rule, dtype and device, from the same ranks, reduced from everybody's data."""
    rows = [join([part.held[rank].to(device, dtype) for part in parts]) for rank in parts[0].held]
    total = fold(rows, _FOLDS[rule]).to(dtype)
    shapes = [next(iter(part.held.values())).shape for part in parts]
    columns = total.split([math.prod(shape) for shape in shapes])
    given = zip(parts, columns, shapes, strict=True)
    return [pair for part, column, shape in given for pair in _given(part, column.view(shape))]


def _folded_there(parts: list[StateSlice], rule: str, channel: Channel) -> Values:
    """Large states of one rule, by a reduction."""
    from fabric.collectives.reduce import reduce_tree

    me, own = channel.collective.rank_in_group, []
    for part in parts:
        state, shape = part.states[0], next(iter(part.held.values())).shape
        dtype, device = _common_dtype(part), _common_device(part, channel)
        if me in part.held:
            own.append(_sent(state, _value(state)).to(device, dtype, copy=True))
        else:
            own.append(torch.full(shape, _neutral(rule, dtype), dtype=dtype, device=device))
    reduced = reduce_tree(own, rule, channel, label=_VERB)
    return [pair for part, value in zip(parts, reduced, strict=True) for pair in _given(part, value)]


def _neutral(rule: str, dtype: torch.dtype) -> Any:
    if rule == "sum":
        return 0
    if dtype is torch.bool:
        return rule == "min"
    if dtype.is_floating_point:
        return float("inf") if rule == "min" else -float("inf")
    limits = torch.iinfo(dtype)
    return limits.max if rule == "min" else limits.min


def _leaders(group: Any) -> list[int]:
    """For each metric of a collection, the first of its compute group, where torchmetrics guessed these."""
    places = {name: place for place, name in enumerate(group._modules)}
    leaders = [-1] * len(places)
    if group._enable_compute_groups is True and group._groups_checked:
        for names in group._groups.values():
            for name in names:
                leaders[places[name]] = places[names[0]]
    return leaders


def _check_guesses(found: FoundStates, told: list[Told]) -> None:
    """Refuse a collection in which one rank updated a metric in place of another that is not the same.

    Raises:
        UsageError: On all ranks alike.
    """
    places = {id(member.metric): place for place, member in enumerate(found.members)}
    for number, group in enumerate(found.groups):
        names, guesses = list(group._modules), [one.leaders[number] for one in told]
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


def _find(leaves: list[Any], tree: Any) -> FoundStates:
    """The metrics among `leaves`, the leaves of `tree`.

    Raises:
        ArgumentTypeError: A leaf is no metric.
        UsageError: A metric is synchronised already, or a MetricTracker was never incremented.
    """
    found, seen = FoundStates([], [], [], []), set[int]()
    for place, leaf in enumerate(leaves):
        target = leaf
        if isinstance(leaf, MetricTracker):
            if not leaf._increment_called:
                raise UsageError(
                    "compute_metrics of a MetricTracker gives the value of its current step, but it has none "
                    "yet. Call tracker.increment() first."
                )
            target = leaf[-1]
        if not isinstance(target, (Metric, MetricCollection)):
            path = [path for path, _ in iter_paths(tree)][place]
            raise ArgumentTypeError(
                f"compute_metrics takes torchmetrics metrics, MetricCollections, and nestings of them, but "
                f"metrics{path} is {type(leaf).__name__}: {leaf!r:.80}. Pass an object of a subclass of "
                "torchmetrics.Metric, or use fabric.all_reduce for tensors and numbers."
            )
        found.computed.append(target)
        texts: list[str] = []
        _walk(target, "", found, seen, texts)
        found.drawn.append(" ".join(texts))
    return found


def updates_of(metric: Any) -> int:
    """Return the number of updates of the metric on this rank; at least 1 if there were any."""
    count = int(metric._update_count)
    if count or not isinstance(metric, WrapperMetric):
        return count
    # Wrappers do not count; torchmetrics' own one with states counts by itself.
    if hasattr(metric, _RUNNING_COUNT):
        return int(getattr(metric, _RUNNING_COUNT))
    return int(any([_changed(getattr(metric, name), old) for name, old in metric._defaults.items()]))


def _walk(module: Any, name: str, found: FoundStates, seen: set[int], texts: list[str]) -> None:
    # Children first: a ClasswiseWrapper shows the states of the metric inside as its own.
    # By id: a metric's hash reads its states, and its == gives a metric.
    known = id(module) in seen
    seen.add(id(module))
    for key, child in module._modules.items():
        if child is not None:
            _walk(child, f"{name}.{key}" if name else key, found, seen, texts)
    kind, title = type(module).__name__, f"{name}: " if name else ""
    if isinstance(module, MetricCollection):
        texts.append(f"{title}{kind}({module.prefix!r}, {module.postfix!r})")
        if not known:
            found.groups.append(module)
    elif isinstance(module, Metric):
        states = [] if id(module._defaults) in seen else _states(module)
        described = ", ".join([_describe(state) for state in states])
        texts.append(f"{title}{kind}({described})")
        if known:
            return
        if module._is_synced:
            raise UsageError(
                f"compute_metrics: {name or kind} holds the states of all ranks already. Call .unsync() on "
                "it before, or do not call .sync()."
            )
        seen.add(id(module._defaults))
        found.members.append(Member(module, f"{name} ({kind})" if name else kind, states))


def _states(metric: Any) -> list[State]:
    made = []
    for name in metric._defaults:
        reduction = metric._reductions[name]
        rule = _RULES.get(id(reduction), "call")
        made.append(State(metric, name, rule, reduction if rule == "call" else None))
    return made


def _describe(state: State) -> str:
    default = state.metric._defaults[state.name]
    shape = list(default.shape) if isinstance(default, torch.Tensor) else "..."
    return f"{state.name} {state.rule}{shape}"


def _changed(value: Any, default: Any) -> bool:
    if isinstance(default, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.shape != default.shape or not torch.equal(value, default.to(value.device, value.dtype))
    return len(value) > 0


@contextmanager
def _lent(found: FoundStates, values: Values, updates: list[int]) -> Iterator[None]:
    """In the block the metrics hold other states, and synchronise nothing; afterwards all is as it was.

    Args:
        found: All metrics of the call.
        values: States with the values that they have in the block.
        updates: How often each member was updated, in the block; 0 leaves its own count.
    """
    changed: dict[int, tuple[Any, dict[str, Any]]] = {}
    for member, count in zip(found.members, updates, strict=True):
        new: dict[str, Any] = {"_computed": None, "_to_sync": False}
        if count:
            new[_RUNNING_COUNT if hasattr(member.metric, _RUNNING_COUNT) else "_update_count"] = count
        changed[id(member.metric)] = member.metric, new
    for group in found.groups:  # else it copies the states of one member over those of others
        changed[id(group)] = group, {"_groups": {}, "_state_is_copy": group._state_is_copy}
    for state, value in values:
        changed[id(state.metric)][1][state.name] = value
    saved: list[tuple[Any, dict[str, Any]]] = []
    try:
        for owner, new in changed.values():
            saved.append((owner, {name: getattr(owner, name) for name in new}))
            _assign(owner, new)
        yield
    finally:
        for owner, old in reversed(saved):
            _assign(owner, old)


def _assign(owner: Any, values: dict[str, Any]) -> None:
    own = vars(owner)
    for name, value in values.items():
        if name in own:
            own[name] = value  # nn.Module's way would look for parameters and submodules first
        else:
            setattr(owner, name, value)
