"""Who goes first (a download before anyone reads it): how the others wait, and learn what became of it."""

from __future__ import annotations

import pickle
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fabric.core.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.strategies.strategy import Strategy


class Turn:
    """One `rank_zero_first`. All ranks must make it, and then either `lead` or not, and `follow`.

    The others wait through the store, not in a collective: however long the first rank takes, nothing times
    out while it lives.

    Args:
        strategy: Carries the news.
        local: The first rank of each machine counts, not that of the job.
    """

    def __init__(self, strategy: Strategy, local: bool) -> None:
        here = strategy.topology
        self.leads = (here.local_rank if local else here.rank) == 0
        self._strategy, self._local, self._verb = strategy, local, f"rank_zero_first(local={local})"
        self._firsts = range(0, here.world_size, here.local_world_size) if local else range(1)
        strategy.meet(self._verb)
        self._through = None  # else `failure` is where the others wait
        self._guard = strategy.collective.guard
        if self._guard is not None:
            from fabric.plugins.collectives.control import Arrival

            why = "it is in the block, and gave no sign of life"
            self._through = Arrival(self._guard.waits, "first", self._firsts, why, patient=True)

    @contextmanager
    def lead(self) -> Iterator[None]:
        """The block of a rank that goes first."""
        try:
            yield
        finally:
            if self._through is not None:
                self._through.tell(self._strategy.topology.rank)

    def follow(self) -> None:
        """Wait until the first ranks are through.

        Raises:
            CollectiveMismatch: One of them makes a collective in its block, which the others cannot come to;
                on all ranks.
            RankError: One of them has ended, or given no sign of life for as long as collectives wait.
        """
        if self._through is not None and self._guard is not None:
            from fabric.plugins.collectives.frames import call_of

            what = f"waiting until rank {', '.join(map(str, self._firsts))} leaves the block"
            self._guard.wait(self._through, call_of(self._verb, what))

    def failure(self, error: BaseException | None) -> BaseException | None:
        """The error of the rank that went first, of this machine or else of another; None: all went well.

        All ranks must call this.

        Args:
            error: On a first rank: its own outcome. Ignored elsewhere.
        """
        here = self._strategy.topology
        told = self._strategy.all_gather_object(_portable(error, here.rank), label=self._verb)
        if self._through is not None and here.rank == 0:  # all ranks are past it now
            self._through.forget()
        failures = [told[here.rank - here.local_rank if self._local else 0], *told]
        return next((failure for failure in failures if failure is not None), None)


def _portable(error: BaseException | None, rank: int) -> BaseException | None:
    """The error as other ranks raise it: the same one where it pickles, else a RankError that quotes it."""
    if error is None:
        return None
    try:
        same: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        same = RankError(f"rank {rank} failed first: {type(error).__name__}: {error}")
    with suppress(AttributeError):  # an exception class with slots
        same.fabric_raised_by = rank  # type: ignore[attr-defined]
    if hasattr(same, "add_note"):  # Python 3.11
        same.add_note(f"raised by rank {rank} in fabric.rank_zero_first()")
    return same
