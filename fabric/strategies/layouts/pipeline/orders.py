"""In which order a stage goes forward and backward through the micro-batches of a step."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Order = list[tuple[Literal["F", "B"], int]]
"""("F", 2): forward of micro-batch 2."""


def forwards(count: int) -> Order:
    """All forwards."""
    return [("F", index) for index in range(count)]


def backwards(count: int) -> Order:
    """All backwards, the last micro-batch first: its activations are the youngest."""
    return [("B", index) for index in reversed(range(count))]


def gpipe(stage: int, stages: int, count: int) -> Order:
    """All forwards, then all backwards: a stage holds the activations of `count` micro-batches at once."""
    return forwards(count) + backwards(count)


def one_forward_one_backward(stage: int, stages: int, count: int) -> Order:
    """A backward as soon as there can be one: a stage holds those of at most `stages - stage` at once."""
    ahead = min(stages - stage - 1, count)
    order = forwards(ahead)
    for index in range(count - ahead):
        order += [("F", ahead + index), ("B", index)]
    return order + [("B", index) for index in range(count - ahead, count)]


def at_once(order: Order, count: int) -> set[int]:
    """The micro-batches that go back right after their forward; without backwards in the order, the last."""
    if not any([kind == "B" for kind, _ in order]):
        return {count - 1}
    follows = itertools.pairwise(order)
    return {i for (kind, i), (then, j) in follows if kind == "F" and then == "B" and i == j}


SCHEDULES: dict[str, Callable[[int, int, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
"""What `PipelineStrategy(schedule=...)` takes: (stage, stages, micro-batches) -> order."""
