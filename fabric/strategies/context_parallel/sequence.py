"""This rank's shard of a sequence, and its positions. Without context parallelism it is the full sequence."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from fabric.core._torch import backward_pass
from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fabric.collectives.channel import Channel


class SequenceShard:
    """A rank's shard of a sequence: two pieces, one from each half, which balances causal attention.

    Args:
        length: Length of the full sequence; at least 2 x `count`.
        rank: Index of the rank among those that share the sequence.
        count: Number of these ranks.
    """

    def __init__(self, length: int, rank: int, count: int) -> None:
        self.length, self.rank, self.count = length, rank, count

    @cached_property
    def spans(self) -> list[list[tuple[int, int]]]:
        """Pairs (start, end) of the two pieces of each rank in the full sequence, in rank order."""
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
        return self.spans[self.rank]

    @property
    def size(self) -> int:
        """The number of positions of this rank."""
        return self.sizes[self.rank]

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return this rank's positions in the full sequence, shape (size,)."""
        return torch.cat([torch.arange(start, end, device=device) for start, end in self.own])

    def shard_of(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a tensor with the full sequence along `dim`; a copy."""
        return torch.cat([whole.narrow(dim, start, end - start) for start, end in self.own], dim)


class _Current(threading.local):
    part: SequenceShard | None = None


_current = _Current()
sequence_groups: WeakSet[SequenceGroup] = WeakSet()
"""The groups of strategies that exist, in any thread."""


@dataclass(eq=False)
class SequenceGroup:
    """The ranks that share a sequence, and its dimension in arguments."""

    seq_dim: int
    seq_dims: dict[str, int | None]
    channel: Channel | None = None
    """Channel of the ranks of the group; None: this rank only."""
    rank_and_size: tuple[int, int] = (0, 1)
    """(rank, number of ranks) within the group."""
    shard_sizes: set[int] = field(default_factory=set)
    """Sizes of this rank's shards in all forwards so far."""

    def __post_init__(self) -> None:
        sequence_groups.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return SequenceGroup, (self.seq_dim, self.seq_dims)  # groups belong to their process


def current_shard() -> SequenceShard | None:
    """Return the shard that the running modules compute; None: the full sequence."""
    return _current.part


@contextmanager
def viewing(part: SequenceShard) -> Iterator[None]:
    """Context in which modules of this thread compute this shard."""
    before, _current.part = _current.part, part
    try:
        yield
    finally:
        _current.part = before


def sequence_positions(length: int, device: torch.device | None = None) -> Tensor:
    """Return the positions in the full sequence of the `length` elements of a module's input, int64 of shape
    (length,).

    Replaces `torch.arange(length)` in models for `ContextParallel`, without which it is the same. No
    communication.

    Args:
        length: Length of the sequence in the module's input, such as x.shape[1].
        device: Device of the result.

    Raises:
        UsageError: This rank's shard has another length, or it is unknown whether the input is a shard.
    """
    part = _current.part
    if part is None:
        if backward_pass() != -1 and any([length in group.shard_sizes for group in sequence_groups]):
            raise UsageError(
                f"sequence_positions({length}) was called in a recomputation in backward, where it is "
                "unknown whether the input is a full sequence or a shard. Pass torch.utils.checkpoint a "
                "submodule of a module that ContextParallel shards, not a function; or call "
                "sequence_positions before it, and pass the positions as an argument."
            )
        return torch.arange(length, device=device)
    if length != part.size:
        raise UsageError(
            f"sequence_positions({length}) was called where this rank has {part.size} of {part.length} "
            "positions. Pass the length of the sequence in the module's input."
        )
    return part.positions(device)
