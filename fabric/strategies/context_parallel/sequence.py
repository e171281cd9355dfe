"""Which part of a sequence this rank sees: models ask for positions, context parallelism says which they are.

Without context parallelism, and outside of the modules that it divides, a part is the whole.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from fabric.core._torch import backward_pass
from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class SequencePart:
    """A rank's part of a sequence: two pieces, from either end, so that causal attention costs all alike.

    Args:
        length: Of the whole sequence; at least 2 x `count`.
        place: Of the rank among those that share the sequence.
        count: How many they are.
    """

    def __init__(self, length: int, place: int, count: int) -> None:
        self.length, self.place, self.count = length, place, count

    @cached_property
    def spans(self) -> list[list[tuple[int, int]]]:
        """Start and end of the two pieces of each rank in the whole sequence, in rank order."""
        pieces = 2 * self.count
        ends = [self.length * piece // pieces for piece in range(pieces + 1)]
        both = [(rank, pieces - 1 - rank) for rank in range(self.count)]
        return [[(ends[piece], ends[piece + 1]) for piece in pair] for pair in both]

    @cached_property
    def sizes(self) -> list[int]:
        """The number of positions of each rank."""
        return [sum([end - start for start, end in pair]) for pair in self.spans]

    @property
    def own(self) -> list[tuple[int, int]]:
        """This rank's pieces."""
        return self.spans[self.place]

    @property
    def size(self) -> int:
        """The number of positions of this rank."""
        return self.sizes[self.place]

    def positions(self, device: torch.device | None = None) -> Tensor:
        """This rank's positions in the whole, shape (size,)."""
        return torch.cat([torch.arange(start, end, device=device) for start, end in self.own])

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that has the whole sequence along `dim`; a copy."""
        return torch.cat([whole.narrow(dim, start, end - start) for start, end in self.own], dim)


class _Here(threading.local):
    part: SequencePart | None = None


_here = _Here()
part_sizes: set[int] = set()
"""How many positions the parts have had in forwards so far, in any thread."""


def current_part() -> SequencePart | None:
    """The part that the modules see which run now; None: the whole."""
    return _here.part


@contextmanager
def seeing(part: SequencePart) -> Iterator[None]:
    """Context in which modules see this part, in this thread."""
    before, _here.part = _here.part, part
    try:
        yield
    finally:
        _here.part = before


def sequence_positions(length: int, device: torch.device | None = None) -> Tensor:
    """Positions in the whole sequence of the `length` elements that a module sees, int64 of shape (length,).

    In place of `torch.arange(length)`, in models whose sequences may be divided over ranks
    (`ContextParallel`). Without that it is the same. Sends nothing.

    Args:
        length: What the module sees: x.shape[1], say.
        device: Where the positions are wanted.

    Raises:
        UsageError: This rank's part has another length; or it cannot be told whether this is a part.
    """
    part = _here.part
    if part is None:
        if length in part_sizes and backward_pass() != -1:
            raise UsageError(
                f"sequence_positions({length}) was asked where a forward is computed again for a backward, "
                "and it cannot be told whether it saw a whole sequence or a part of a longer one. Give "
                "torch.utils.checkpoint a module inside of what ContextParallel divides, not a function; or "
                "ask for the positions before it, and pass them as an argument."
            )
        return torch.arange(length, device=device)
    if length != part.size:
        raise UsageError(
            f"sequence_positions({length}) was asked where this rank sees {part.size} of {part.length} "
            "positions. Give it the length of the sequence that the module was called with."
        )
    return part.positions(device)
