"""`RankBatchSampler`: one rank's indices, or batches of them, in the place of a loader's sampler.

It knows samplers, not loaders: which part of the order is this rank's, where it begins, how far it went.
"""

from __future__ import annotations

import pickle
from collections import deque
from hashlib import sha256  # the quickest one here: processors have it
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten
from fabric.precision.dtypes import as_bytes
from fabric.utilities.data import sized_len
from fabric.utilities.seed import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.data.order import EpochOrder
    from fabric.data.rules import ShardingRule


_CHECKED = 32
"""Items at an epoch's beginning by which an order is known again."""


class SamplerJob(NamedTuple):
    """The index that a worker must fetch, and the seed of its random draws during the fetch."""

    seed: int
    index: Any


class RankBatchSampler:
    """This rank's batches of indices, or its items where they are whole batches (`rule.batch` None).

    Args:
        order: The items of one epoch.
        rule: How they are dealt out.
        batches: The user's BatchSampler, which has the size of batches, also when that is changed.
    """

    def __init__(self, order: EpochOrder, rule: ShardingRule, batches: Any = None) -> None:
        self.order = order
        self._rule = rule
        self._batches = batches
        self.salts: tuple[int, ...] | None = None
        """Of the seeds of jobs, which workers get in place of batches; None: there are none."""
        self.start = 0
        """The position at which the next iteration begins."""
        self.expected: list[Any] | None = None
        """The check that the next iteration must have, since it goes on in one that had it."""
        self.check: list[Any] | None = None
        """(count, digest) of the epoch's first items; None where they are not drawn."""
        self.ends: deque[int] = deque()
        """Positions after each batch that the last iteration has given out; whoever receives them takes them.
        """

    @property
    def rule(self) -> ShardingRule:
        """The sharding rule of the items, with the current size of the batches."""
        if self._batches is None:
            return self._rule
        return self._rule._replace(batch=self._batches.batch_size, drop_last=self._batches.drop_last)

    def check_even(self) -> None:
        """Under uneven="error", raise before the first item, where the length is known.

        Raises:
            ConfigurationError: The items cannot be dealt out evenly.
        """
        self.rule.check_even(sized_len(self.order) or 0)

    def __iter__(self) -> Iterator[Any]:
        # No generator function: epoch and start are those of this moment, and errors come now.
        self.check_even()
        self.ends, self.check = deque(), None
        keep = max(self.rule.share.world, self.expected[0] if self.expected else 0)
        stream = self.order.stream(self.start, keep)
        return self._noted(stream, self.start, min(self.start, keep), self.ends)

    def _noted(self, stream: Iterator[Any], start: int, kept: int, ends: deque[int]) -> Iterator[Any]:
        # Drawn from only when asked: torch draws from a generator of the user's own before its sampler does.
        whole, salts = self.rule.batch is None, self.salts
        first = list(islice(stream, kept))
        if self.expected is not None:
            self._compare(first[: self.expected[0]], self.expected)
            self.check = self.expected
        elif not start:
            head = list(islice(stream, self.rule.size))
            self.check = _check(head[:_CHECKED])
            stream = chain(head, stream)
        draw = lambda n: list(islice(stream, n))  # noqa: E731
        for items, end, *_ in self.rule.rank_batches(draw, start, first[: self.rule.share.world]):
            mine = items[0] if whole else items
            ends.append(end)
            yield mine if salts is None else SamplerJob(derive_seed(*salts, end), mine)

    def _compare(self, first: list[Any], expected: list[Any]) -> None:
        if _check(first) != expected:
            raise UsageError(
                f"{type(self.order.sampler).__name__} gives another order than when the position was saved: "
                f"the epoch begins with {first[:4]} now. Let it draw from a generator (torch's, python's or "
                "numpy's) that is an attribute of it, or from the global ones; or begin an epoch with "
                "loader.set_epoch()."
            )

    def __len__(self) -> int:
        return self.rule.count(len(self.order))


def _check(items: list[Any]) -> list[Any]:
    return [len(items), digest(items)]


def digest(tree: Any) -> str:
    """A text that is the same in every process that has equal values."""
    return sha256(b",".join([_bytes(leaf) for leaf in flatten(tree)[0]])).hexdigest()[:16]


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        # Pickle would write all that it is a view of.
        plain: Any = as_bytes(value.cpu()).numpy()
        return repr((value.dtype, value.shape)).encode() + bytes(plain)
    if isinstance(value, set | frozenset):
        return repr(sorted([digest(each) for each in value])).encode()
    try:
        return pickle.dumps(value)
    except Exception:  # whatever a class of the user's raises; such values tell nothing
        return type(value).__qualname__.encode()
