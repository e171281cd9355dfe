"""Comparison over ranks of the first calls of models and of their losses.

The mean over ranks of means over 3 and over 2 rows is not the mean over 5 rows; nor for means over tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.loss_check.in_place import compare_mean_gradients
from fabric.loss_check.messages import (
    warn_of_nonlinear,
    warn_of_same,
    warn_of_sum,
    warn_of_unequal,
    warn_of_weights,
)
from fabric.loss_check.record import MAX_CALLS, NUM_CALLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabric.loss_check.record import FirstSteps
    from fabric.loss_check.terms import Term


def compare_first_steps(first: FirstSteps, strategy: Any) -> None:
    """Compare the first steps of all ranks, and warn if averaged gradients differ from those of one process.
    All ranks must call this, after the same number of synchronised backwards.

    Compared are rows of all models, the weight of an item in each loss, the batches, and gradients of means
    in place.

    Args:
        first: The records of this rank.
        strategy: The strategy of the models.
    """
    digests = [[int(digest) for digest in calls.digests] for calls in first.calls]
    means = [(label, line, float(total), float(size)) for label, line, total, size in first.means]
    values = [None if value is None else float(value) for value in first.values]
    local = _facts_of(first), digests, means, values
    gathered = strategy.all_gather_object(local, label="loss check")
    facts, digests_by_rank, means_by_rank, values_by_rank = zip(*gathered, strict=True)
    compare_mean_gradients(means_by_rank)
    _compare_rows(facts)
    replicas = (strategy.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
    if len(gathered) != replicas or replicas == 1:
        return  # ranks of one pipeline, for example, need the same batches
    if all([of_rank.is_sum for of_rank in facts]):
        warn_of_sum(replicas)
    kinds = [next(filter(None, of_rank.nonlinear), "") for of_rank in facts]
    if all(kinds) and not all([of_rank == values_by_rank[0] for of_rank in values_by_rank]):
        warn_of_nonlinear(kinds[0])  # losses that are equal on all ranks are of gathered rows
    if not values or None in values or not all([of_rank == values for of_rank in values_by_rank]):
        return  # losses of equal batches may differ on purpose: drawn actions, another loss per rank
    for calls, by_rank in zip(first.calls, zip(*digests_by_rank, strict=True), strict=True):
        if len({*by_rank[0]}) == NUM_CALLS and all([of_rank == by_rank[0] for of_rank in by_rank]):
            warn_of_same(calls.name, replicas)


class _Compared(NamedTuple):
    """Values of the first calls that ranks compare: rows, and weights of items in losses."""

    terms: tuple[int, ...]
    """Number of terms of each loss."""
    weights: tuple[float, ...]
    """The weight of an item in each; 0: unknown, or `normalize_gradients` divides by the number of items."""
    sizes: tuple[tuple[int, ...], ...]
    """`FirstCalls.sizes` of each model; none if its gradients are divided by the number of items."""
    rows: tuple[int, ...]
    """Rows of each model; 0: unknown, or as `sizes`."""
    nonlinear: tuple[str, ...]
    """What makes each loss no mean over rows."""
    samples_even: bool
    """`FirstSteps.samples_even`."""
    is_sum: bool
    """Whether the first loss is a sum over rows."""


def _facts_of(first: FirstSteps) -> _Compared:
    losses, model = first.losses, next((calls for calls in first.calls if any(calls.sizes)), None)
    # Without a known call (`torch.compile` hides it) a loss may be of any model.
    divided = [any([calls.is_normalized for calls in called or first.calls]) for called in first.called]
    weights = [sum([term.weight() for term in terms]) for terms in losses]
    is_sum = model is not None and model.dims > 1 and bool(losses) and _is_sum(losses[0], model.sizes[0])
    return _Compared(
        terms=tuple(map(len, losses)),
        weights=tuple([0.0 if skip else weight for weight, skip in zip(weights, divided, strict=True)]),
        sizes=tuple([() if calls.is_normalized else tuple(calls.sizes) for calls in first.calls]),
        rows=tuple([0 if calls.is_normalized else calls.rows or 0 for calls in first.calls]),
        nonlinear=tuple(first.nonlinear),
        samples_even=first.samples_even,
        is_sum=is_sum and not divided[0],
    )


def _compare_rows(by_rank: Sequence[_Compared]) -> None:
    """Warn if rows, or weights of items, differ between ranks."""
    num_losses = min([len(of_rank.terms) for of_rank in by_rank])
    losses = [_weights_of(by_rank, index) for index in range(num_losses)]
    unequal = [rows for rows in zip(*[of_rank.rows for of_rank in by_rank], strict=True) if all(rows)]
    unequal = [rows for rows in unequal if len({*rows}) > 1]
    if losses and all(losses) and not any(map(_differ, losses)):
        unequal = []  # an item has one weight on all ranks, so these are no samples: nodes, steps of time
    for rows in unequal:
        warn_of_unequal([*rows])
    if unequal:
        return
    even = all([of_rank.samples_even for of_rank in by_rank])
    sizes = [next((calls[0] for calls in of_rank.sizes if any(calls)), 0) for of_rank in by_rank]
    complete = all([len(calls) < MAX_CALLS for of_rank in by_rank for calls in of_rank.sizes])
    equal_sizes = even or (complete and len({of_rank.sizes for of_rank in by_rank}) == 1)
    for index, weights in enumerate(losses):
        # `uneven="exact"` accepts a mean over unequal numbers of rows: weights times rows are equal. For
        # later losses the number of rows is unknown.
        of_rows = [weight * size or weight for weight, size in zip(weights, sizes, strict=False)]
        if _differ(weights) and (equal_sizes or not index) and (even or _differ(of_rows)):
            warn_of_weights(weights)
            return


def _weights_of(by_rank: Sequence[_Compared], index: int) -> list[float]:
    """Return the weights of an item in one loss of each rank; none if ranks compute different losses."""
    weights = [of_rank.weights[index] for of_rank in by_rank]
    return weights if all(weights) and len({of_rank.terms[index] for of_rank in by_rank}) == 1 else []


def _is_sum(terms: list[Term], rows: int) -> bool:
    """Whether a loss is a sum over `rows` rows: no term is a mean, and one surely sums losses of rows."""
    weights = [(term, abs(term.weight())) for term in terms] if rows > 1 else []
    pairs = [(term, weight) for term, weight in weights if weight]  # annealed terms begin at 0
    sums = [1 for term, weight in pairs if weight == 1 and term.numel > 0 and term.numel % rows == 0]
    return bool(sums) and min([weight for _, weight in pairs]) > 1 / rows


def _differ(numbers: Sequence[float]) -> bool:
    return not all([math.isclose(numbers[0], each, rel_tol=1e-4) for each in numbers])
