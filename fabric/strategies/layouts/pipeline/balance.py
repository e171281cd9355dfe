"""Which blocks go to which stage: by their parameters. All ranks come to the same by themselves."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from fabric.core.messages import say

if TYPE_CHECKING:
    from fabric.strategies.layouts.pipeline.cut import Blocks


def even_balance(blocks: Blocks, stages: int, tell: bool) -> list[int]:
    """How many blocks each stage has, so that the parameters are spread evenly.

    Args:
        blocks: All blocks, as many as stages or more.
        stages: How many there are.
        tell: Whether this rank says what was chosen.
    """
    # A block without parameters counts as a little.
    costs = [sum([p.numel() for p in block.parameters()]) + 1e-3 for _, block in blocks]
    balance = partition(costs, stages)
    if tell and stages > 1:
        ends = itertools.accumulate(balance)
        sums = [f"{sum(costs[end - size : end]):,.0f}" for size, end in zip(balance, ends, strict=True)]
        say(f"pipeline: balance={balance}; parameters of the stages: {', '.join(sums)}.")
    return balance


def partition(costs: list[float], stages: int) -> list[int]:
    """Numbers of consecutive blocks such that the dearest stage is as cheap as can be, the others even.

    Args:
        costs: Of each block, as many as stages or more.
        stages: How many parts, each of 1 block or more.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    # Of the first blocks, by their number: the dearest part, the sum of squares, where the parts end.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for used in range(1, stages + 1):
        best = {
            end: min(
                [
                    (max(dearest, cost := sums[end] - sums[start]), squares + cost**2, [*ends, end])
                    for start, (dearest, squares, ends) in best.items()
                    if start < end
                ]
            )
            for end in range(used, len(sums) - (stages - used))
        }
    return [end - start for start, end in itertools.pairwise([0, *best[len(costs)][2]])]
