"""Descriptions of metrics for `compute_metrics`, and states joined, stacked or averaged over all ranks.

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
    """A metric, as the user would name it, with its states."""

    metric: Any
    name: str
    states: list[State]


class FoundStates(NamedTuple):
    """All metrics of a call."""

    computed: list[Any]
    """The leaves of the user's tree, to call `compute` of."""
    members: list[Member]
    """Every metric in them, once."""
    groups: list[Any]
    """Every MetricCollection in them, once."""
    drawn: list[str]
    """Every leaf as a person would write it down: classes, states and their rules."""


class Told(NamedTuple):
    """All that one rank holds, as it travels."""

    updates: list[int]
    """How often each metric was updated."""
    leaders: list[list[int]]
    """Of each collection for each metric, whose states it shares by torchmetrics' guess; -1: no guess."""
    held: list[list[Any]]
    """Of each metric for each state a tensor, `OnOtherRank`, or a list; the same one for all of a compute
    group. Empty: it was never updated.
    """


class OnOtherRank(NamedTuple):
    """A large tensor that is reduced by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_cpu: bool


class StateSlice(NamedTuple):
    """Values of a state that some ranks hold."""

    place: int
    """Place of the metric among all."""
    member: Member
    states: list[State]
    """All that hold the same on every rank: those of a compute group."""
    held: dict[int, Any]
    """What each of those ranks holds."""


def gathered(part: StateSlice, told: list[Told], device: torch.device) -> Any:
    """A state that needs every rank's part: joined, stacked, averaged, or given to its own reduction."""
    state, held = part.states[0], part.held
    if not all([isinstance(value, torch.Tensor) for value in held.values()]):
        entries = [entry for value in held.values() for entry in _entries(value, device)]
        return state.call(entries) if state.call is not None and len(held) > 1 else entries
    tensors = [value.to(device) for value in held.values()]
    if len(tensors) == 1:
        return tensors[0].clone()
    if state.rule == "cat":
        return torch.cat([tensor if tensor.dim() else tensor[None] for tensor in tensors])
    check_shapes(part)
    if state.rule == "mean":
        return _mean(tensors, [told[rank].updates[part.place] for rank in held])
    stacked = torch.stack(tensors)
    return stacked if state.call is None else state.call(stacked)


def _entries(value: Any, device: torch.device) -> list[Any]:
    entries = [value] if isinstance(value, torch.Tensor) else value
    return [entry.to(device) if isinstance(entry, torch.Tensor) else entry for entry in entries]


def _mean(tensors: list[Tensor], counts: list[int]) -> Tensor:
    first = tensors[0]
    if all([torch.equal(tensor, first) for tensor in tensors]):
        return first.clone()  # not of rounding; and integers have no other mean
    dtype = torch.complex128 if first.is_complex() else torch.float64
    scaled = [tensor.to(dtype) * count for tensor, count in zip(tensors, counts, strict=True)]
    mean = fold(scaled, ReduceOp.SUM) / sum(counts)
    return mean.to(
        first.dtype if first.is_floating_point() or first.is_complex() else torch.get_default_dtype()
    )


def check_shapes(part: StateSlice) -> None:
    """Raise, on all ranks, if they hold the state in different shapes."""
    shapes = {rank: tuple(value.shape) for rank, value in part.held.items()}
    if len(set(shapes.values())) > 1:
        table = ", ".join([f"rank {rank}: {list(shape)}" for rank, shape in shapes.items()])
        raise CollectiveMismatch(
            f"compute_metrics: state {part.states[0].name!r} of {part.member.name} has different shapes on "
            f"ranks ({table}). Construct the metric alike on all ranks, and give it data of one kind."
        )


def repaired(values: list[tuple[Any, Any]], ranks: dict[int, int]) -> list[tuple[Any, Any]]:
    """The states, those of known metrics pooled.

    Args:
        values: States with their merged values.
        ranks: By the id of each metric, how many ranks updated it.
    """
    # torchmetrics 1.9 aggregates two ranks only, and fails for more: pooled as one process would have them.
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
    """Numbers, extremes, means and squared deviations, (ranks, outputs), as of one sample.

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
