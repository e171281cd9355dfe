"""Metrics whose own way from the stacked states of many ranks to a value is wrong in torchmetrics.

Their states are pooled here as one process would have them. Called by merge.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchmetrics import regression

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.metrics.members import State


def repaired(values: list[tuple[State, Any]], ranks: dict[int, int]) -> list[tuple[State, Any]]:
    """The states, those of known metrics pooled.

    Args:
        values: States with their merged values.
        ranks: By the id of each metric, how many ranks updated it.
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
