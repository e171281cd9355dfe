"""Ranks that wait in different groups for each other: found through the store, and judged once for all of
them.

Within one group frames meet and a mismatch shows. Rank 0 in a call of the group (0, 1) and rank 1 in a call
of the world never meet: each waits for the other. A rank that has waited a while posts where it stands. Who
waits on a circle can never go on, and stays there; so whoever sees the circle first writes a verdict, the
ranks on it all raise, and send a poisoned frame for every call of the circle that they never came to, so that
counts agree again. Costs nothing until a call has waited for `PATIENCE`.
"""

from __future__ import annotations

import json
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.plugins.collectives.frames import Said, mismatch_text
from fabric.plugins.collectives.job_store import JobStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import timedelta

PATIENCE = 1.0
"""Seconds that a call waits before its rank looks where the others are."""


class Wait(NamedTuple):
    """Where a rank stands, as it tells the others."""

    rank: int
    stamp: int
    """Counts this rank's posts, so that two looks at the same text mean one wait."""
    group: str
    turn: int
    """It waits in this call of the group, counted from 1."""
    members: list[int]
    counts: dict[str, int]
    """How many calls of each group it has come to."""
    verb: str
    what: str
    where: str

    def row(self) -> Said:
        """Its line in the table."""
        ranks = f"ranks {', '.join(map(str, self.members))}"
        return Said(self.rank, f"{self.verb} of {ranks}", self.what, self.where)


class Here(NamedTuple):
    """A call of all ranks that this process waits in, for the watchdog."""

    verb: str
    where: str
    since: float
    """Of `time.monotonic()`."""


class Whereabouts(NamedTuple):
    """Where all ranks are."""

    gone: list[int]
    """Those that have ended, or cannot say."""
    table: str
    """A line for each rank; "" if they cannot be asked."""


def stuck(waits: Mapping[int, Wait]) -> set[int]:
    """The ranks that can never go on: each waits for one that waits, and so on in a circle.

    A rank that is not in `waits` is on its way. Waiting ends when every member has come to the call.
    """
    held = set(waits)
    while True:
        moving = {
            rank
            for rank in held
            if not any(
                [
                    other in held and waits[other].counts.get(waits[rank].group, 0) < waits[rank].turn
                    for other in waits[rank].members
                ]
            )
        }
        if not moving:
            return held
        held -= moving


class Waits:
    """This rank's view of where the ranks of the job wait.

    Args:
        store: The store of the default process group.
        rank: This process among all.
        world_size: How many processes there are.
        timeout: How long collectives of the job wait for a rank.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        self.store = JobStore("fabric/waits", store)
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.counts: dict[str, int] = {}
        """How many calls of each group this rank has come to."""
        self.guards: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        """This rank's guards, by the name of their group."""
        self.here: Here | None = None
        """What this rank waits in, once it has waited for `PATIENCE`."""
        self.explain: Callable[[], Whereabouts] | None = None
        """Asks all ranks where they are; a watchdog's."""
        self._stamp = 0
        self._verdicts: list[dict[int, Wait]] = []

    def post(self, group: str, turn: int, members: list[int], row: Said) -> int:
        """Tell the others where this rank waits; gives the stamp of this wait."""
        self._stamp += 1
        wait = Wait(self.rank, self._stamp, group, turn, members, self.counts, *row[1:])
        self.store.set(f"at/{self.rank}", json.dumps(wait))
        return self._stamp

    def withdraw(self) -> None:
        """Tell the others that this rank has gone on."""
        self.store.set(f"at/{self.rank}", "")

    def leave(self) -> None:
        """Tell the others that this rank will make no call any more."""
        self.store.set(f"left/{self.rank}", "")

    def have_left(self, ranks: Iterable[int]) -> bool:
        """Whether any of these ranks has left."""
        return any([self.store.check([f"left/{rank}"]) for rank in ranks])

    def verdict_on(self, stamp: int) -> int | None:
        """The number of the verdict that ends the wait `stamp` of this rank; None: it may go on waiting."""
        self._hear()
        for number, verdict in enumerate(self._verdicts):
            if self.rank in verdict and verdict[self.rank].stamp == stamp:
                return number
        return None

    def judge(self) -> None:
        """Write a verdict if this rank is stuck, unless another rank has just written one."""
        waits = self.read()
        held = stuck(waits)
        if self.rank not in held:
            return
        again = self.read()  # each of them stood still between the two looks, so all stood still at one time
        if any([again.get(rank) != waits[rank] for rank in held]):
            return
        text = json.dumps([waits[rank] for rank in sorted(held)])
        self.store.compare_set(f"verdict/{len(self._verdicts)}", "", text)

    def read(self) -> dict[int, Wait]:
        """Where each waiting rank stands, without those whose wait a verdict has ended."""
        over = {(wait.rank, wait.stamp) for verdict in self._verdicts for wait in verdict.values()}
        waits = {}
        for rank in range(self.world_size):
            text = self.store.get(f"at/{rank}") if self.store.check([f"at/{rank}"]) else b""
            if text:
                wait = Wait(*json.loads(text))
                if (wait.rank, wait.stamp) not in over:
                    waits[rank] = wait
        return waits

    def missed(self, number: int) -> list[Wait]:
        """The waits of a verdict in calls that this rank should have come to, and has not."""
        self._hear()
        calls = {(wait.group, wait.turn): wait for wait in self._verdicts[number].values()}
        return [
            wait
            for (group, turn), wait in calls.items()
            if self.rank in wait.members and self.counts.get(group, 0) < turn
        ]

    def is_judged(self, number: int) -> bool:
        """Whether a verdict ended a wait of this rank."""
        self._hear()
        return self.rank in self._verdicts[number]

    def text_of(self, number: int) -> str:
        """The error of a verdict, the same on all ranks."""
        self._hear()
        rows = [wait.row() for wait in self._verdicts[number].values()]
        text = mismatch_text(rows)
        return f"{text}\nThey wait in different groups for each other, and none of them can go on."

    def _hear(self) -> None:
        while self.store.check([f"verdict/{len(self._verdicts)}"]):
            text = self.store.get(f"verdict/{len(self._verdicts)}")
            waits = [Wait(*fields) for fields in json.loads(text)]
            self._verdicts.append({wait.rank: wait for wait in waits})
