"""`RankGroup`: comparison of the ranks that iterate a loader, and iteration in lockstep."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import ConfigurationError, UsageError
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class RankGroup(NamedTuple):
    """The ranks that iterate a loader: this rank's number, the world size and an all-gather."""

    rank: int
    world: int
    exchange: Callable[[Any], list[Any]]
    """Returns the values that the ranks passed, in rank order. All ranks must call it."""
    all: Callable[[bool], bool]
    """Whether all ranks pass True, in a message of fixed size. All ranks must call it."""

    def compared(
        self, pairs: Iterator[Any], consistency_key: Callable[[], dict[str, Any] | None], epoch: int
    ) -> Iterator[Any]:
        """Yield from `pairs`; ranks compare before the second pair.

        A rank that only inspects the first batch never requests the second one.

        Args:
            pairs: Pairs (batch, position) of an iteration.
            consistency_key: Returns the values that must be equal on all ranks; None: no comparison.
            epoch: The number of the iteration, which must be equal, too.

        Raises:
            UsageError: On all ranks, if the values differ.
        """
        yield from islice(pairs, 1)
        pair = next(pairs, None)
        if pair is None:
            return
        local = consistency_key()
        if local is not None:
            self._compare({"epoch": epoch, **local})
        yield pair
        yield from pairs

    def _compare(self, local: dict[str, Any]) -> None:
        by_rank = self.exchange(local)
        keys = list(dict.fromkeys([key for each in by_rank for key in each]))
        differ = [key for key in keys if any([each.get(key) != by_rank[0].get(key) for each in by_rank])]
        if not differ:
            return
        rows = [", ".join([f"{key} {each.get(key)}" for key in differ]) for each in by_rank]
        raise UsageError(
            "The ranks iterate this loader differently, so samples would be repeated and lost:\n"
            f"{table(rows)}\n"
            "Begin each epoch on all ranks (if one rank alone took a batch, its loader counted an epoch: "
            "call loader.set_epoch(n) on all ranks). Load positions on all ranks, and pass all ranks the "
            "same data and sampler, with equally seeded generators. If you have split the data over ranks "
            "yourself, write setup_dataloaders(loader, use_distributed_sampler=False)."
        )

    def lockstep(self, pairs: Iterator[Any], length: int | None, raises: bool) -> Iterator[Any]:
        """Yield from `pairs` while all ranks have a batch. A single message if all lengths are known.

        Only for data that Fabric does not shard; data that it shards need no message.

        Args:
            pairs: Pairs (batch, position) of an iteration.
            length: The number of pairs; None: unknown.
            raises: Whether all ranks raise when the first of them has no more; else they stop.

        Raises:
            ConfigurationError: With `raises`, on all ranks, if their numbers of batches differ.
        """
        lengths = self.exchange(length)
        if None not in lengths:
            if len(set(lengths)) > 1:
                _report_unequal_lengths([f"{count} batches" for count in lengths], raises)
            yield from islice(pairs, min(lengths))
            return
        count = 0
        while True:
            pair = next(pairs, None)
            if not self.all(pair is not None):
                more = self.exchange(pair is not None)
                if any(more):
                    _report_unequal_lengths([f"{'more than ' * has}{count} batches" for has in more], raises)
                return
            count += 1
            yield pair


def _report_unequal_lengths(counts: list[str], raises: bool) -> None:
    text = f"The ranks' data are of different lengths:\n{table(counts)}\n"
    if raises:
        raise ConfigurationError(
            f'{text}uneven="error" does not allow that. Make the lengths equal, or write uneven="drop" to '
            "stop all ranks when the first has no batch left."
        )
    rank_zero_warn(
        f"{text}In training all ranks stop when the first has no batch left, and skip the rest of the epoch. "
        'To use all data, write uneven="exact", or evaluate under torch.no_grad().',
        category=RanksDifferWarning,
    )


def table(rows: list[str]) -> str:
    """Return a text with one line per rank."""
    return "\n".join([f"  rank {rank}: {row}" for rank, row in enumerate(rows)])
