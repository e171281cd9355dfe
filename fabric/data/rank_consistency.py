"""`RankGroup`: this rank among the others that iterate a loader; they compare, and stop together."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import ConfigurationError, UsageError
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class RankGroup(NamedTuple):
    """This rank among the others."""

    rank: int
    world: int
    exchange: Callable[[Any], list[Any]]
    """Gives every rank's value of what each passes. All ranks must call it."""

    def compared(
        self, pairs: Iterator[Any], consistency_key: Callable[[], dict[str, Any] | None], epoch: int
    ) -> Iterator[Any]:
        """`pairs`; ranks compare before the second, which one that only looks at a batch never asks for.

        Args:
            pairs: An iteration's batches, with notes.
            consistency_key: Gives what all ranks must have alike by then; None: nothing.
            epoch: The number of the iteration, which must be alike, too.

        Raises:
            UsageError: On all ranks: they iterate differently.
        """
        yield from islice(pairs, 1)
        found = next(pairs, None)
        if found is None:
            return
        mine = consistency_key()
        if mine is not None:
            self._compare({"epoch": epoch, **mine})
        yield found
        yield from pairs

    def _compare(self, mine: dict[str, Any]) -> None:
        held = self.exchange(mine)
        keys = list(dict.fromkeys([key for each in held for key in each]))
        differ = [key for key in keys if any([each.get(key) != held[0].get(key) for each in held])]
        if not differ:
            return
        rows = [", ".join([f"{key} {each.get(key)}" for key in differ]) for each in held]
        raise UsageError(
            "The ranks iterate this loader differently, so samples would be repeated and lost:\n"
            f"{table(rows)}\n"
            "Begin each epoch on all ranks (a rank that has looked at a batch by itself has counted an "
            "epoch: loader.set_epoch(n) on all ranks), load positions on all ranks, and give all ranks "
            "the same data and sampler, with random generators seeded alike. Of data that you have split "
            "over ranks yourself: setup_dataloaders(loader, use_distributed_sampler=False)."
        )

    def lockstep(self, pairs: Iterator[Any], length: int | None, refuses: bool) -> Iterator[Any]:
        """Yield from `pairs` while all ranks have a batch. One message in all if all lengths are known.

        Only for data that Fabric does not deal out itself; what it deals out needs no message.

        Args:
            pairs: An iteration's batches, with notes.
            length: How many there are; None: unknown.
            refuses: Whether ranks raise, all of them, when the first of them has no more; else they stop.

        Raises:
            ConfigurationError: With `refuses`, on all ranks: their numbers of batches differ.
        """
        lengths = self.exchange(length)
        if None not in lengths:
            if len(set(lengths)) > 1:
                _tell([f"{count} batches" for count in lengths], refuses)
            yield from islice(pairs, min(lengths))
            return
        count = 0
        while True:
            found = next(pairs, None)
            more = self.exchange(found is not None)
            if not all(more):
                if any(more):
                    _tell([f"{'more than ' * has}{count} batches" for has in more], refuses)
                return
            count += 1
            yield found


def _tell(counts: list[str], refuses: bool) -> None:
    text = f"The ranks' data are of different lengths:\n{table(counts)}\n"
    if refuses:
        raise ConfigurationError(
            f'{text}uneven="error" refuses that. Give all ranks as much, or write uneven="drop" to stop '
            "with the first that has no more."
        )
    rank_zero_warn(
        f"{text}All of them stop with the first that has no more, since they train together; the rest of "
        'the epoch is left out. Evaluate under torch.no_grad(), or write uneven="exact", to see all of '
        "it.",
        category=RanksDifferWarning,
    )


def table(rows: list[str]) -> str:
    """One line for each rank."""
    return "\n".join([f"  rank {rank}: {row}" for rank, row in enumerate(rows)])
