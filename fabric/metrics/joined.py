"""Descriptions of metrics for `compute_metrics`, and states concatenated, stacked or averaged over ranks.

Called by sync.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ReduceOp
from torchmetrics import regression

from fabric.collectives.frames import fold
from fabric.core.errors import CollectiveMismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class State(NamedTuple):
    """One state of one metric."""

    metric: Any
    name: str
    rule: str
    """"sum", "min", "max", "mean", "cat", "none" or "call"."""
    call: Callable[[Any], Any] | None
    """The metric's own reduction, for "call"."""


class Member(NamedTuple):
    """A metric with its name in messages and its states."""

    metric: Any
    name: str
    states: list[State]


class FoundStates(NamedTuple):
    """All metrics of a call."""

    computed: list[Any]
    """The leaves of the user's tree, whose `compute` is called."""
    members: list[Member]
    """Every metric in the leaves, once."""
    groups: list[Any]
    """Every MetricCollection in the leaves, once."""
    descriptions: list[str]
    """A text for every leaf: classes, states and their rules."""


class RankStates(NamedTuple):
    """The states of one rank, as they are sent."""

    updates: list[int]
    """The number of updates of each metric."""
    leaders: list[list[int]]
    """For each collection and metric, the metric that shares its states by torchmetrics' guess; -1: none."""
    values: list[list[Any]]
    """For each metric and state a tensor, `OnOtherRank`, or a list; the same object within a compute group.
    Empty: the metric was never updated.
    """


class OnOtherRank(NamedTuple):
    """The description of a large tensor, which is not sent but reduced separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_cpu: bool


class StateSlice(NamedTuple):
    """The values of a state on the ranks that have it."""

    metric_index: int
    """Index of the metric in `FoundStates.members`."""
    member: Member
    states: list[State]
    """All states with equal values on every rank: those of a compute group."""
    by_rank: dict[int, Any]
    """The value on each of those ranks."""


def combine(piece: StateSlice, rank_states: list[RankStates], device: torch.device) -> Any:
    """Return a state of all ranks: concatenated, stacked, averaged or reduced by its own function."""
    state, by_rank = piece.states[0], piece.by_rank
    if not all([isinstance(value, torch.Tensor) for value in by_rank.values()]):
        entries = [entry for value in by_rank.values() for entry in _entries(value, device)]
        return state.call(entries) if state.call is not None and len(by_rank) > 1 else entries
    tensors = [value.to(device) for value in by_rank.values()]
    if len(tensors) == 1:
        return tensors[0].clone()
    if state.rule == "cat":
        return torch.cat([tensor if tensor.dim() else tensor[None] for tensor in tensors])
    check_shapes(piece)
    if state.rule == "mean":
        return _mean(tensors, [rank_states[rank].updates[piece.metric_index] for rank in by_rank])
    stacked = torch.stack(tensors)
    return stacked if state.call is None else state.call(stacked)


def _entries(value: Any, device: torch.device) -> list[Any]:
    entries = [value] if isinstance(value, torch.Tensor) else value
    return [entry.to(device) if isinstance(entry, torch.Tensor) else entry for entry in entries]


def _mean(tensors: list[Tensor], counts: list[int]) -> Tensor:
    first = tensors[0]
    if all([torch.equal(tensor, first) for tensor in tensors]):
        return first.clone()  # without rounding, and integers stay integers
    dtype = torch.complex128 if first.is_complex() else torch.float64
    scaled = [tensor.to(dtype) * count for tensor, count in zip(tensors, counts, strict=True)]
    mean = fold(scaled, ReduceOp.SUM) / sum(counts)
    return mean.to(
        first.dtype if first.is_floating_point() or first.is_complex() else torch.get_default_dtype()
    )


def check_shapes(piece: StateSlice) -> None:
    """Raise, on all ranks, if the state's shapes differ between them."""
    shapes = {rank: tuple(value.shape) for rank, value in piece.by_rank.items()}
    if len(set(shapes.values())) > 1:
        table = ", ".join([f"rank {rank}: {list(shape)}" for rank, shape in shapes.items()])
        raise CollectiveMismatch(
            f"compute_metrics: state {piece.states[0].name!r} of {piece.member.name} has different shapes on "
            f"ranks ({table}). Construct the metric with the same arguments on all ranks, and update it with "
            "data of the same kind."
        )


def pool_nrmse(values: list[tuple[Any, Any]], ranks: dict[int, int]) -> list[tuple[Any, Any]]:
    """Return the states, those of NormalizedRootMeanSquaredError pooled over ranks.

    Args:
        values: States with their stacked values.
        ranks: By the id of each metric, the number of ranks that updated it.
    """
    # torchmetrics 1.9 aggregates two ranks only, and fails for more.
    kind = getattr(regression, "NormalizedRootMeanSquaredError", None)
    if kind is None:
        return values
    stacks: dict[int, dict[str, Tensor]] = {}
    for state, value in values:
        if isinstance(state.metric, kind) and ranks[id(state.metric)] > 1:
            stacks.setdefault(id(state.metric), {})[state.name] = value
    pools = {metric: _pool(stacked) for metric, stacked in stacks.items()}
    return [
        (state, pools[id(state.metric)][state.name] if id(state.metric) in pools else value)
        for state, value in values
    ]


def _pool(stacked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return counts, extremes, means and squared deviations, (ranks, outputs), of the joint sample.

    Source: https://en.wikipedia.org/wiki/Algorithms_for_calculating_variance#Parallel_algorithm
    """
    number, means = stacked["total"], stacked["mean_val"]
    mean = (number * means).sum(0) / number.sum(0)
    return {
        "total": number.sum(0),
        "mean_val": mean,
        "var_val": (stacked["var_val"] + number * (means - mean) ** 2).sum(0),
        "min_val": stacked["min_val"].amin(0),
        "max_val": stacked["max_val"].amax(0),
        "target_squared": stacked["target_squared"].sum(0),
    }
