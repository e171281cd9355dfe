"""`Peers`: this rank among the others that iterate a loader, and what they compare."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Peers(NamedTuple):
    """This rank among the others."""

    rank: int
    world: int
    exchange: Callable[[Any], list[Any]]
    """Gives every rank's value of what each passes. All ranks must call it."""

    def compared(
        self, pairs: Iterator[Any], agreed: Callable[[], dict[str, Any] | None], epoch: int
    ) -> Iterator[Any]:
        """`pairs`; ranks compare before the second, which one that only looks at a batch never asks for.

        Args:
            pairs: An iteration's batches, with notes.
            agreed: Gives what all ranks must have alike by then; None: nothing.
            epoch: The number of the iteration, which must be alike, too.

        Raises:
            UsageError: On all ranks: they iterate differently.
        """
        yield from islice(pairs, 1)
        found = next(pairs, None)
        if found is None:
            return
        mine = agreed()
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


def table(rows: list[str]) -> str:
    """One line for each rank."""
    return "\n".join([f"  rank {rank}: {row}" for rank, row in enumerate(rows)])
