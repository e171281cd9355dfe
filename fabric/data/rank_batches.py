"""`RankBatchSampler`: replaces a loader's sampler; yields one rank's indices, or batches of them.

Used by the loader adapters. Depends on samplers only, never on loaders.
"""

from __future__ import annotations

import pickle
from collections import deque
from hashlib import sha256  # fastest: processors have instructions for it
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten
from fabric.data.order import with_set_epoch
from fabric.precision.dtypes import as_bytes
from fabric.utilities.data import sized_len
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.seed import derive_seed
from fabric.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.data.order import EpochOrder
    from fabric.data.rules import ShardingRule


_CHECKED = 32
"""Number of items at an epoch's beginning whose digest identifies the order."""
_FEW = 4
"""Fewer indices may have the same order twice by chance."""
_ADVICE = (
    "If it counts epochs itself, give it a method set_epoch(epoch), which Fabric calls. Else draw in the "
    "sampler from the global generators of torch, python or numpy, or from one that is its attribute"
)


class SamplerJob(NamedTuple):
    """The index that a worker must fetch, and the seed of its random draws during the fetch."""

    seed: int
    index: Any


class RankBatchSampler:
    """This rank's batches of indices, or its items if they are whole batches (`rule.batch` None).

    Args:
        order: The items of one epoch.
        rule: The sharding rule.
        batches: The user's BatchSampler. Its current batch size and drop_last replace those of `rule`.
    """

    def __init__(self, order: EpochOrder, rule: ShardingRule, batches: Any = None) -> None:
        self.order = order
        self._rule = rule
        self._batches = batches
        self.seed_parts: tuple[int, ...] | None = None
        """Inputs of the seeds of jobs, which workers get in place of indices; None: no workers."""
        self.start = 0
        """The position at which the next iteration begins."""
        self.expected_digest: list[Any] | None = None
        """The `order_digest` of the saved epoch, which the next iteration must match; None: no check."""
        self.order_digest: list[Any] | None = None
        """(count, digest) of the epoch's first items; None until they are drawn."""
        self.first_digest: list[Any] | None = None
        """The `order_digest` of the first of several epochs that differed. A resumed epoch that equals it is
        warned of; None: no check."""
        self.end_positions: deque[int] = deque()
        """Position after each batch that was yielded and not yet received; the receiver pops it."""

    @property
    def rule(self) -> ShardingRule:
        """Return the sharding rule, with the current size of the batches."""
        if self._batches is None:
            return self._rule
        return self._rule._replace(batch=self._batches.batch_size, drop_last=self._batches.drop_last)

    def check_even(self) -> None:
        """Under uneven="error", raise before the first item if the length is known.

        Raises:
            ConfigurationError: The number of items does not divide by ranks.
        """
        self.rule.check_even(sized_len(self.order) or 0)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator function: epoch and start are read now, and errors are raised now.
        self.check_even()
        self.end_positions, self.order_digest = deque(), None
        keep = max(self.rule.shard.world, self.expected_digest[0] if self.expected_digest else 0)
        stream = self.order.stream(self.start, keep)
        return self._generate(stream, self.start, min(self.start, keep), self.end_positions)

    def _generate(
        self, stream: Iterator[Any], start: int, keep: int, end_positions: deque[int]
    ) -> Iterator[Any]:
        # A generator function: torch must draw from the user's generator before the sampler does.
        whole_batches, seed_parts = self.rule.batch is None, self.seed_parts
        first = list(islice(stream, keep))
        if self.expected_digest is not None:
            self._check_order(first[: self.expected_digest[0]], self.expected_digest)
            self.order_digest = self.expected_digest
        elif not start:
            head = list(islice(stream, self.rule.size))
            self.order_digest = _order_digest(head[:_CHECKED])
            if self.order_digest == self.first_digest and self._counts_itself(head[:_CHECKED]):
                rank_zero_warn(
                    f"{type(self.order.sampler).__name__} begins this epoch, the first after a resume, with "
                    f"the order of the first epoch of all. {_ADVICE}.",
                    category=PossibleUserWarning,
                )
            stream = chain(head, stream)
        draw = lambda n: list(islice(stream, n))  # noqa: E731
        for items, end, *_ in self.rule.rank_batches(draw, start, first[: self.rule.shard.world]):
            local = items[0] if whole_batches else items
            end_positions.append(end)
            yield local if seed_parts is None else SamplerJob(derive_seed(*seed_parts, end), local)

    def _counts_itself(self, head: list[Any]) -> bool:
        """Whether the sampler itself must count, if its order begins with these items again."""
        sampler = self.order.sampler
        is_own = not type(sampler).__module__.startswith("torch.") and not with_set_epoch(sampler)
        counts = [getattr(item, "numel", int)() or 1 for item in flatten(head)[0]]  # tensors of indices
        return is_own and sum(counts) >= _FEW

    def _check_order(self, first: list[Any], expected_digest: list[Any]) -> None:
        if _order_digest(first) != expected_digest:
            raise UsageError(
                f"{type(self.order.sampler).__name__} has another order than when the position was saved: "
                f"the epoch now begins with {first[:4]!s:.80}. {_ADVICE}; or start an epoch with "
                "loader.set_epoch()."
            )

    def __len__(self) -> int:
        return self.rule.count(len(self.order))


def _order_digest(items: list[Any]) -> list[Any]:
    return [len(items), digest(items)]


def digest(tree: Any) -> str:
    """Return a digest of the leaves that is equal across processes for equal values."""
    return sha256(b",".join([_bytes(leaf) for leaf in flatten(tree)[0]])).hexdigest()[:16]


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        # Pickle would write the whole storage of a view.
        plain: Any = as_bytes(value.cpu()).numpy()
        return repr((value.dtype, value.shape)).encode() + bytes(plain)
    if isinstance(value, set | frozenset):
        return repr(sorted([digest(each) for each in value])).encode()
    try:
        return pickle.dumps(value)
    except Exception:  # a user's class may raise anything; only its type is compared then
        return type(value).__qualname__.encode()
