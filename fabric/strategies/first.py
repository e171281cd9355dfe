"""Who goes first (a download before anyone reads it): how the others wait, and learn what became of it."""

from __future__ import annotations

import json
import pickle
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fabric.core.errors import CollectiveMismatch, RankError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.strategies.strategy import Strategy

_BEAT = 1.0
"""Seconds between signs of life of a rank that goes first; less where collectives wait for a short time."""


class Turn:
    """One `rank_zero_first`. All ranks must make it, and then either `lead` or not, and `follow`.

    The others wait through the store, not in a collective: however long the first rank takes, nothing times
    out while it gives signs of life.

    Args:
        strategy: Carries the news.
        local: The first rank of each machine counts, not that of the job.
    """

    def __init__(self, strategy: Strategy, local: bool) -> None:
        here = strategy.topology
        self.leads = (here.local_rank if local else here.rank) == 0
        self._strategy, self._local = strategy, local
        self._firsts = range(0, here.world_size, here.local_world_size) if local else range(1)
        strategy.meet(f"rank_zero_first(local={local})")
        self._guard = strategy.collective.guard
        self._count = self._guard.count if self._guard is not None else 0
        job = strategy.collective.job  # where the others wait; a job of another engine may have none
        self._store: Any = None if job is None else job.store
        self._timeout = 0.0 if job is None else job.timeout.total_seconds()
        if job is not None:
            job.counts["first"] = job.counts.get("first", 0) + 1  # alike on all ranks
            self._name = f"first/{job.counts['first']}"
        self._answered: set[tuple[int, int]] = set()  # waits (rank, stamp) to which this rank has come

    @contextmanager
    def lead(self) -> Iterator[None]:
        """The block of a rank that goes first; a thread gives signs of life meanwhile."""
        if self._store is None:
            yield
            return
        key = f"{self._name}/{self._strategy.topology.rank}"
        over = threading.Event()
        pause = min(_BEAT, self._timeout / 4)
        beating = threading.Thread(
            target=_beat,
            args=(self._store.clone(), f"{key}/beat", over, pause),
            name="fabric-beat",
            daemon=True,
        )
        beating.start()
        try:
            yield
        finally:
            over.set()
            beating.join()
            self._store.set(f"{key}/done", "")

    def follow(self) -> None:
        """Wait until the first ranks are through.

        One that makes a collective in its block, which the others cannot come to, gets a CollectiveMismatch.

        Raises:
            RankError: One of them has not given a sign of life for as long as collectives wait.
        """
        if self._store is not None:
            for rank in self._firsts:
                self._await(rank)

    def _await(self, rank: int) -> None:
        store: Any = self._store
        beats, seen, pause = 0, time.monotonic(), 0.002
        while not store.check([f"{self._name}/{rank}/done"]):
            now = store.add(f"{self._name}/{rank}/beat", 0)
            if now != beats:
                beats, seen = now, time.monotonic()
            if self._is_waited_for(rank):
                # Come to it, with another call: the first rank gets the table of who called what, in its
                # block, and `failure` brings it to all.
                with suppress(CollectiveMismatch):
                    self._strategy.meet("rank_zero_first", f"waiting until rank {rank} leaves the block")
            if time.monotonic() - seen > self._timeout:
                raise RankError(
                    f"rank_zero_first: rank {rank} is in the block and has not given a sign of life for "
                    f"{self._timeout:.0f} s. Its process or machine has stopped."
                )
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)

    def _is_waited_for(self, rank: int) -> bool:
        """Whether a first rank waits in its block, in a collective that not only first ranks must make.

        True once for each such wait.
        """
        from fabric.plugins.collectives.waits import Wait

        guard, store, key = self._guard, self._store, f"at/{rank}"
        text = store.get(key) if guard is not None and store is not None and store.check([key]) else b""
        if guard is None or not text:
            return False
        wait = Wait(*json.loads(text))
        # What it waited for at the beginning of this turn may not be withdrawn yet, nor what a verdict ended.
        over = (wait.group, wait.turn) == (guard.name, self._count) or (rank, wait.stamp) in self._answered
        if over or {*wait.members} <= {*self._firsts}:
            return False
        self._answered.add((rank, wait.stamp))
        return True

    def failure(self, error: BaseException | None) -> BaseException | None:
        """The error of the rank that went first, of this machine or else of another; None: all went well.

        All ranks must call this.

        Args:
            error: On a first rank: its own outcome. Ignored elsewhere.
        """
        here = self._strategy.topology
        mine = here.rank - here.local_rank if self._local else 0
        # Every rank takes part in every machine's news: a broadcast is a call of all ranks.
        news = {source: self._told_by(source, error) for source in self._firsts}
        if self._guard is not None and self._store is not None and self.leads:  # all ranks are past it now
            for name in ("beat", "done"):
                self._store.delete_key(f"{self._name}/{here.rank}/{name}")
        failures = [news[mine], *news.values()]
        return next((failure for failure in failures if failure is not None), None)

    def _told_by(self, source: int, error: BaseException | None) -> BaseException | None:
        told: BaseException | None = self._strategy.broadcast(_portable(error, source), source)
        return told


def _beat(store: Any, key: str, over: threading.Event, pause: float) -> None:
    while not over.is_set():
        store.add(key, 1)
        over.wait(pause)


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
