"""Ranks that wait in different groups for each other: found through the store, and judged once for all of
them.

Within one group frames meet and a mismatch shows. Rank 0 in a call of the group (0, 1) and rank 1 in a call
of the world never meet: each waits for the other. A rank that has waited a while posts where it stands. Who
waits on a circle can never go on, and stays there; so whoever sees the circle first writes a verdict, the
ranks on it all raise, and send a poisoned frame for every call of the circle that they never came to, so that
counts agree again. Costs nothing until a call has waited for `PATIENCE`.

A rank that stands still in torch's own collectives (a backward, the forward of a sharded model) makes no call
of ours; its watchdog posts for it which of them it has begun and waits for. If a rank that has not begun one
of these waits in a call that the first has not come to, they came in different orders, and neither goes on.
Nor do ranks whose collectives of one number are of different kinds. Nobody can send for another then: if
nobody is on the way, all ranks that can raise do, and from then on at each call.
"""

from __future__ import annotations

import json
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.plugins.collectives.frames import Said, mismatch_text
from fabric.plugins.collectives.job_store import JobStore
from fabric.plugins.collectives.recorder import collectives_of, latest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import timedelta

    from fabric.plugins.collectives.recorder import Begun

PATIENCE = 1.0
"""Seconds that a call waits before its rank looks where the others are."""


class Wait(NamedTuple):
    """Where a rank stands, as it tells the others: in a call of a guard, or in torch's own collectives."""

    rank: int
    stamp: int
    """Counts this rank's posts, so that two looks at the same text mean one wait."""
    group: str
    turn: int
    """It waits in this call of the group, counted from 1; 0: in collectives of torch."""
    members: list[int]
    counts: dict[str, int]
    """How many calls of each group it has come to."""
    verb: str
    what: str
    where: str
    begun: dict[str, int]
    """How many of torch's collectives it has begun in each group."""
    pending: dict[str, list[tuple[int, str]]]
    """Number and kind of torch's collectives that it may wait for; none in a call of a guard."""

    def needs(self, other: Wait) -> bool:
        """Whether this wait cannot end before `other` has."""
        if self.turn:
            return other.rank in self.members and other.counts.get(self.group, 0) < self.turn
        for group in self.pending.keys() & other.begun.keys():
            theirs = dict(other.pending.get(group, []))
            for number, kind in self.pending[group]:
                if number > other.begun[group] or theirs.get(number, kind) != kind:
                    return True
        return False

    def row(self) -> Said:
        """Its line in the table."""
        if not self.turn:
            return Said(self.rank, self.verb, self.what, self.where)
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

    left: list[int]
    """Those that have ended."""
    silent: list[int]
    """Those that do not answer."""
    table: str
    """A line for each rank; "" if they cannot be asked."""


def stuck(waits: Mapping[int, Wait]) -> set[int]:
    """The ranks that can never go on: each waits for one that waits, and so on in a circle.

    A rank that is not in `waits` is on its way. Waiting ends when every member has come to the call.
    """
    held = set(waits)
    while True:
        moving = {rank for rank in held if not any([waits[rank].needs(waits[other]) for other in held])}
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
        self.broken: int | None = None
        """The number of a verdict after which no call of the job can be right any more."""
        self._stamp = 0
        self._lock = threading.Lock()  # the watchdog posts, too
        self._verdicts: dict[int, dict[int, Wait]] = {}
        self._recorded = latest()
        self._judged = 0  # how many posts of all ranks there were when this rank looked last
        self.store.set(f"at/{rank}", "")

    def post(self, group: str, turn: int, members: list[int], row: Said) -> int:
        """Tell the others in which call this rank waits; gives the stamp of this wait."""
        begun = self.begun(threading.get_ident()).last
        return self._post(self.store, (group, turn, members, dict(self.counts), *row[1:], begun, {}))

    def begun(self, thread: int) -> Begun:
        """Which of torch's collectives this rank has begun since the job's group was made."""
        return collectives_of(thread, self._recorded)

    def post_still(self, store: JobStore, row: Said, begun: Begun) -> int:
        """The same for a rank whose thread stands still in torch's collectives; for its watchdog.

        Args:
            store: This part of the job's store, for another thread.
            row: Where it stands.
            begun: What it has begun.
        """
        return self._post(store, ("", 0, [], dict(self.counts), *row[1:], *begun))

    def _post(self, store: JobStore, rest: tuple[Any, ...]) -> int:
        with self._lock:
            self._stamp += 1
            store.set(f"at/{self.rank}", json.dumps((self.rank, self._stamp, *rest)))
            store.add("posts", 1)
            return self._stamp

    def withdraw(self, stamp: int, store: JobStore | None = None) -> None:
        """Tell the others that this rank has gone on, unless it waits again by now."""
        with self._lock:
            if stamp == self._stamp:
                (store or self.store).set(f"at/{self.rank}", "")

    def leave(self) -> None:
        """Tell the others that this rank will make no call any more."""
        self.store.set(f"left/{self.rank}", "")
        self.store.add("left", 1)

    def have_left(self, ranks: Iterable[int]) -> bool:
        """Whether any of these ranks has left."""
        return bool(self.store.add("left", 0)) and any([self.store.check([f"left/{rank}"]) for rank in ranks])

    def verdict_on(self, stamp: int) -> int | None:
        """The number of the verdict that ends the wait `stamp` of this rank; None: it may go on waiting."""
        self.hear()
        if self.broken is not None:
            return self.broken
        for number, verdict in self._verdicts.items():
            if self.rank in verdict and verdict[self.rank].stamp == stamp:
                return number
        return None

    def judge(self, store: JobStore | None = None) -> None:
        """Write a verdict if this rank is stuck, unless another rank has just written one."""
        store = store or self.store
        posts = store.add("posts", 0)
        if posts == self._judged:  # who was not stuck then is not stuck now
            return
        waits = self.read(store)
        held = stuck({rank: wait for rank, wait in waits.items() if wait.turn})
        if self.rank not in held:
            held = stuck(waits)  # nobody can be helped out of torch's collectives: only if all stand still
            if len(held) < self.world_size:
                self._judged = posts
                return
        again = self.read(store)  # who stood still between the two looks stood still at one time
        if any([again.get(rank) != waits[rank] for rank in held]):
            return
        text = json.dumps([waits[rank] for rank in sorted(held)])
        store.compare_set(f"verdict/{len(self._verdicts)}", "", text)

    def read(self, store: JobStore | None = None) -> dict[int, Wait]:
        """Where each waiting rank stands, without those whose wait a verdict has ended."""
        store = store or self.store
        over = {(wait.rank, wait.stamp) for verdict in self._verdicts.values() for wait in verdict.values()}
        texts = store.get_all([f"at/{rank}" for rank in range(self.world_size)]).values()
        waits = [Wait(*json.loads(text)) for text in texts if text]
        return {wait.rank: wait for wait in waits if (wait.rank, wait.stamp) not in over}

    def missed(self, number: int) -> list[Wait]:
        """The waits of a verdict in calls that this rank should have come to, and has not."""
        self.hear()
        calls = {(wait.group, wait.turn): wait for wait in self._verdicts[number].values()}
        return [
            wait
            for (group, turn), wait in calls.items()
            if self.rank in wait.members and self.counts.get(group, 0) < turn
        ]

    def is_judged(self, number: int) -> bool:
        """Whether a verdict ended a wait of this rank."""
        self._learn(number)
        return self.rank in self._verdicts[number]

    def text_of(self, number: int) -> str:
        """The error of a verdict, the same on all ranks."""
        self._learn(number)
        rows = [wait.row() for wait in self._verdicts[number].values()]
        why = "They wait in different groups for each other, and none of them can go on."
        if number == self.broken:
            why = (
                "They wait for each other, and none of them can go on: what one has begun the other has not "
                "come to. No further call of this job can be right."
            )
        return f"{mismatch_text(rows)}\n{why}"

    def can_raise(self, number: int) -> bool:
        """Whether a rank of a verdict waits in a call of a guard, which raises."""
        return any([wait.turn for wait in self._verdicts[number].values()])

    def _learn(self, number: int) -> None:
        if number not in self._verdicts:  # else no question to a store that may have gone meanwhile
            self.hear()

    def hear(self, store: JobStore | None = None) -> None:
        """Read the verdicts that have been written meanwhile."""
        store = store or self.store
        while store.check([f"verdict/{(number := len(self._verdicts))}"]):
            waits = [Wait(*fields) for fields in json.loads(store.get(f"verdict/{number}"))]
            self._verdicts[number] = {wait.rank: wait for wait in waits}
            if not all([wait.turn for wait in waits]):
                self.broken = number
