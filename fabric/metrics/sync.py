"""`compute_metrics`: the values of metrics that one process with the data of all ranks would compute.

Each rank sends its states as one object: in the call check's frame if small, else in one message after it.
Large states that can be reduced are only described in it; they are reduced by one collective per rule.
"""

from __future__ import annotations

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

from fabric.collectives.frames import PACK_LIMIT, call_of, fold, format_tree
from fabric.collectives.objects import PickledObject, gather_pickled
from fabric.core.errors import ArgumentTypeError, UsageError
from fabric.core.tree import flatten, iter_paths, unflatten
from fabric.metrics import joined
from fabric.metrics.joined import FoundStates, Member, OnOtherRank, RankStates, State, StateSlice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fabric.collectives.channel import Channel

    Values = list[tuple[State, Any]]

_VERB = "compute_metrics"
_REDUCE_OPS = {
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
}
"""Rules that are a reduction over ranks; all others need every rank's value."""
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


def compute_metrics(metrics: Any, channel: Channel, model_parallel_size: int = 1) -> Any:
    """Return the values of `metrics` over all ranks, equal on all; the metrics keep this rank's states.

    States are merged in rank order: sums, minima and maxima are reduced, and lists are concatenated. A mean
    is weighted by the ranks' numbers of updates, as torchmetrics weights batches in `forward` (unlike its
    synchronisation). Tensors without a reduction are stacked; a metric's custom reduction gets the stack, or
    the list. Ranks that never updated a metric are left out; if only one rank did, its states are used
    unchanged. The metric's synchronisation settings are ignored.

    In a model-parallel group only the last rank that updated a metric counts. So the data count once, also if
    several of its ranks updated the metric with them.

    Args:
        metrics: A torchmetrics Metric, MetricCollection or MetricTracker (its current step), or any nesting
            of them; the same on all ranks of the group, which must all make the call.
        channel: The group.
        model_parallel_size: Number of consecutive ranks with the same data, as in a pipeline or with context
            parallelism.

    Raises:
        ArgumentTypeError: A leaf is no metric; or a state cannot be pickled.
        CollectiveMismatch: On all ranks: they have different metrics, or a state has different shapes.
        UsageError: A metric has the states of all ranks already (`sync()`); a MetricTracker has no step; the
            compute groups guessed by a MetricCollection are wrong on another rank.
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
            rank_states = gather_pickled(
                call_of(_VERB, format_tree(spec, found.descriptions)), pickled, channel, copies=False
            )
            if model_parallel_size > 1:
                _keep_one_rank_per_group(rank_states, model_parallel_size)
            _check_guesses(found, rank_states)
            values = _merged(_state_slices(found, rank_states), rank_states, channel)
        updates = [
            sum(counts) for counts in zip(*[rank_state.updates for rank_state in rank_states], strict=True)
        ]
    with _temporary_states(found, values, updates):
        results = [metric.compute() for metric in found.computed]
    return unflatten(results, spec, metrics)


def _local_states(found: FoundStates, world: int) -> RankStates:
    """Return the states of this rank's metrics.

    Raises:
        ArgumentTypeError: A state cannot be pickled.
    """
    local = RankStates([], [_leaders(group) for group in found.groups], [])
    sendable: dict[int, Any] = {}
    large: dict[int, OnOtherRank] = {}
    size = 0
    for member in found.members:
        count = updates_of(member.metric)
        local.updates.append(count)
        values: list[Any] = []
        for state in member.states if count else []:
            value = _value(state)
            if id(value) not in sendable:
                to_send = sendable[id(value)] = _to_send(state, value)
                if state.rule in _REDUCE_OPS and isinstance(to_send, torch.Tensor):
                    large[id(to_send)] = OnOtherRank(tuple(to_send.shape), to_send.dtype, to_send.is_cpu)
                    size += to_send.nbytes
            values.append(sendable[id(value)])
        local.values.append(values)
    if world * size > PACK_LIMIT:
        for values in local.values:
            values[:] = [large.get(id(to_send), to_send) for to_send in values]
    return local


def _to_send(state: State, value: Any) -> Any:
    if isinstance(value, bool | int | float | complex):
        return torch.tensor(value)
    if isinstance(value, torch.Tensor):
        return value.detach()
    entries = [entry.detach() if isinstance(entry, torch.Tensor) else entry for entry in value]
    if not all([isinstance(entry, torch.Tensor) for entry in entries]):
        # Raises with the name of the state.
        PickledObject(entries, _VERB, f"state {state.name!r} of {type(state.metric).__name__}")
    return entries


def _state_slices(found: FoundStates, rank_states: list[RankStates]) -> list[StateSlice]:
    pieces: dict[Any, StateSlice] = {}
    for index, member in enumerate(found.members):
        for state_index, state in enumerate(member.states):
            by_rank = {
                rank: rank_state.values[index][state_index]
                for rank, rank_state in enumerate(rank_states)
                if rank_state.values[index]
            }
            key = (state.rule, id(state.call), *[(rank, id(value)) for rank, value in by_rank.items()])
            if key in pieces:
                pieces[key].states.append(state)
            elif by_rank:
                pieces[key] = StateSlice(index, member, [state], by_rank)
    return list(pieces.values())


def _keep_one_rank_per_group(rank_states: list[RankStates], size: int) -> None:
    """Keep each metric's states only of the last rank of each model-parallel group that updated it."""
    for index in range(len(rank_states[0].updates)):
        updated = [rank for rank, rank_state in enumerate(rank_states) if rank_state.updates[index]]
        chosen = {rank // size: rank for rank in updated}  # the last of each group
        for rank, rank_state in enumerate(rank_states):
            if chosen.get(rank // size) != rank:
                rank_state.updates[index], rank_state.values[index] = 0, []


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


def _common_dtype(piece: StateSlice) -> torch.dtype:
    dtype: torch.dtype = reduce(torch.promote_types, [value.dtype for value in piece.by_rank.values()])
    return dtype


def _common_device(piece: StateSlice, channel: Channel) -> torch.device:
    """Return the device of the state on all ranks, or one to which all of them can copy it."""
    on_host = all([value.is_cpu for value in piece.by_rank.values()])
    return torch.device("cpu") if on_host else channel.transport.device


def _for_each_state(piece: StateSlice, value: Tensor) -> Values:
    """Return the merged value for each of the states, on the state's device."""
    return [(state, value.to(_device(state))) for state in piece.states]


def _merged(pieces: list[StateSlice], rank_states: list[RankStates], channel: Channel) -> Values:
    """Return the merged states of all ranks, equal on all of them."""
    values: Values = []
    large: dict[str, list[StateSlice]] = {}
    others = []
    for piece in pieces:
        rule, kinds = piece.states[0].rule, {type(value) for value in piece.by_rank.values()}
        if rule not in _REDUCE_OPS or not kinds <= {torch.Tensor, OnOtherRank}:
            others.append(piece)
            continue
        if len({value.shape for value in piece.by_rank.values()}) > 1:
            joined.check_shapes(piece)
        if OnOtherRank in kinds:
            large.setdefault(rule, []).append(piece)
        else:
            dtype, device = _common_dtype(piece), _common_device(piece, channel)
            rows = [value.to(device, dtype) for value in piece.by_rank.values()]
            values += _for_each_state(piece, fold(rows, _REDUCE_OPS[rule]).to(dtype))
    for rule in _REDUCE_OPS:
        values += _reduce_large(large[rule], rule, channel) if rule in large else []
    # Last, since a metric's custom reduction may raise: the other ranks must not wait for this one.
    combined: Values = []
    for piece in others:
        value = joined.combine(piece, rank_states, _device(piece.states[0]))
        combined += [(state, value) for state in piece.states]
    updated_ranks = {id(state.metric): len(piece.by_rank) for piece in others for state in piece.states}
    return values + joined.pool_nrmse(combined, updated_ranks) if combined else values


def _reduce_large(pieces: list[StateSlice], rule: str, channel: Channel) -> Values:
    """Reduce large states of one rule by a collective."""
    from fabric.collectives.reduce import reduce_tree

    group_rank, tensors = channel.collective.rank_in_group, []
    for piece in pieces:
        state, shape = piece.states[0], next(iter(piece.by_rank.values())).shape
        dtype, device = _common_dtype(piece), _common_device(piece, channel)
        if group_rank in piece.by_rank:
            tensors.append(_to_send(state, _value(state)).to(device, dtype, copy=True))
        else:
            tensors.append(torch.full(shape, _neutral(rule, dtype), dtype=dtype, device=device))
    reduced = reduce_tree(tensors, rule, channel, label=_VERB)
    return [
        pair for piece, value in zip(pieces, reduced, strict=True) for pair in _for_each_state(piece, value)
    ]


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
    """Return, for each metric of a collection, the first of its compute group; -1: no group was guessed."""
    indices = {name: index for index, name in enumerate(group._modules)}
    leaders = [-1] * len(indices)
    if group._enable_compute_groups is True and group._groups_checked:
        for names in group._groups.values():
            for name in names:
                leaders[indices[name]] = indices[names[0]]
    return leaders


def _check_guesses(found: FoundStates, rank_states: list[RankStates]) -> None:
    """Raise if a rank updated one metric in place of another with which it shares no compute group elsewhere.

    Raises:
        UsageError: On all ranks.
    """
    indices = {id(member.metric): index for index, member in enumerate(found.members)}
    for number, group in enumerate(found.groups):
        names, guesses = list(group._modules), [rank_state.leaders[number] for rank_state in rank_states]
        for state_index, name in enumerate(names):
            for rank, guess in enumerate(guesses):
                leader, updated = (
                    guess[state_index],
                    rank_states[rank].updates[indices[id(group._modules[name])]],
                )
                differing = [
                    r for r, other in enumerate(guesses) if other[state_index] not in (-1, other[leader])
                ]
                if leader not in (-1, state_index) and updated > 1 and differing:
                    raise UsageError(
                        f"A MetricCollection updated only {names[leader]!r} in place of {name!r} on rank "
                        f"{rank}: their states were equal by chance after the first update there (on rank "
                        f"{differing[0]}, not). The rest of rank {rank}'s data is lost for {name!r}. Write "
                        "MetricCollection(..., compute_groups=False), or pass the groups as a list."
                    )


def _find(leaves: list[Any], tree: Any) -> FoundStates:
    """Return the metrics in `leaves`, the leaves of `tree`.

    Raises:
        ArgumentTypeError: A leaf is no metric.
        UsageError: A metric is synchronised already, or a MetricTracker was never incremented.
    """
    found, seen = FoundStates([], [], [], []), set[int]()
    for index, leaf in enumerate(leaves):
        target = leaf
        if isinstance(leaf, MetricTracker):
            if not leaf._increment_called:
                raise UsageError(
                    "compute_metrics of a MetricTracker returns the value of its current step, but it has "
                    "none yet. Call tracker.increment() first."
                )
            target = leaf[-1]
        if not isinstance(target, (Metric, MetricCollection)):
            path = [path for path, _ in iter_paths(tree)][index]
            raise ArgumentTypeError(
                f"compute_metrics takes torchmetrics metrics, MetricCollections, and nestings of them, but "
                f"metrics{path} is {type(leaf).__name__}: {leaf!r:.80}. Pass an object of a subclass of "
                "torchmetrics.Metric, or use fabric.all_reduce for tensors and numbers."
            )
        found.computed.append(target)
        texts: list[str] = []
        _walk(target, "", found, seen, texts)
        found.descriptions.append(" ".join(texts))
    return found


def updates_of(metric: Any) -> int:
    """Return the number of updates of the metric on this rank; at least 1 if there were any."""
    count = int(metric._update_count)
    if count or not isinstance(metric, WrapperMetric):
        return count
    # Wrappers do not count updates, except for torchmetrics' Running, which has states.
    if hasattr(metric, _RUNNING_COUNT):
        return int(getattr(metric, _RUNNING_COUNT))
    return int(any([_changed(getattr(metric, name), old) for name, old in metric._defaults.items()]))


def _walk(module: Any, name: str, found: FoundStates, seen: set[int], texts: list[str]) -> None:
    # Children first: a ClasswiseWrapper has the states of its inner metric as attributes.
    # By id: a metric's hash reads its states, and its == returns a metric.
    is_known = id(module) in seen
    seen.add(id(module))
    for key, child in module._modules.items():
        if child is not None:
            _walk(child, f"{name}.{key}" if name else key, found, seen, texts)
    kind, title = type(module).__name__, f"{name}: " if name else ""
    if isinstance(module, MetricCollection):
        texts.append(f"{title}{kind}({module.prefix!r}, {module.postfix!r})")
        if not is_known:
            found.groups.append(module)
    elif isinstance(module, Metric):
        states = [] if id(module._defaults) in seen else _states(module)
        described = ", ".join([_describe(state) for state in states])
        texts.append(f"{title}{kind}({described})")
        if is_known:
            return
        if module._is_synced:
            raise UsageError(
                f"compute_metrics: {name or kind} has the states of all ranks already. Call .unsync() on "
                "it before, or do not call .sync()."
            )
        seen.add(id(module._defaults))
        found.members.append(Member(module, f"{name} ({kind})" if name else kind, states))


def _states(metric: Any) -> list[State]:
    sendable = []
    for name in metric._defaults:
        reduction = metric._reductions[name]
        rule = _RULES.get(id(reduction), "call")
        sendable.append(State(metric, name, rule, reduction if rule == "call" else None))
    return sendable


def _describe(state: State) -> str:
    default = state.metric._defaults[state.name]
    shape = list(default.shape) if isinstance(default, torch.Tensor) else "..."
    return f"{state.name} {state.rule}{shape}"


def _changed(value: Any, default: Any) -> bool:
    if isinstance(default, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.shape != default.shape or not torch.equal(value, default.to(value.device, value.dtype))
    return len(value) > 0


@contextmanager
def _temporary_states(found: FoundStates, values: Values, updates: list[int]) -> Iterator[None]:
    """Context in which the metrics have other states and do not synchronise; restores them afterwards.

    Args:
        found: All metrics of the call.
        values: States with their values in the block.
        updates: Number of updates of each member in the block; 0 keeps its count.
    """
    changed: dict[int, tuple[Any, dict[str, Any]]] = {}
    for member, count in zip(found.members, updates, strict=True):
        new: dict[str, Any] = {"_computed": None, "_to_sync": False}
        if count:
            new[_RUNNING_COUNT if hasattr(member.metric, _RUNNING_COUNT) else "_update_count"] = count
        changed[id(member.metric)] = member.metric, new
    for group in found.groups:  # without groups it copies no states between members
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
    tensors = vars(owner)
    for name, value in values.items():
        if name in tensors:
            tensors[name] = value  # setattr of nn.Module would look for parameters and submodules first
        else:
            setattr(owner, name, value)
