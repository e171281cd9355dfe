"""Ranks that wait in different groups for each other: found through the store, and judged once for all of
them.

Within one group frames meet and a mismatch shows. Rank 0 in a call of the group (0, 1) and rank 1 in a call
of the world never meet: each waits for the other. A rank that has waited a while posts where it stands. Who
waits on a circle can never go on, and stays there; so whoever sees the circle first writes a verdict, which
all ranks that wait raise, now and at each later call. Costs nothing until a call has waited for `PATIENCE`.

A rank that stands still in torch's own collectives (a backward, the forward of a sharded model) makes no call
of ours; its watchdog posts for it which of them it has begun and waits for. If a rank that has not begun one
of these waits in a call that the first has not come to, they came in different orders, and neither goes on.
Nor do ranks whose collectives of one number are of different kinds. That is judged if nobody is on the way.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.torch_internals import flight_record, group_names
from fabric.plugins.collectives.frames import Said
from fabric.plugins.collectives.job_store import JobStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import timedelta

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


class Begun(NamedTuple):
    """Collectives by the name of their group, each counted from 1; without sends and receives."""

    last: dict[str, int]
    """The last one that this process has begun, of each group that it is in; 0: none."""
    pending: dict[str, list[tuple[int, str]]]
    """Number and kind ("gloo:all_reduce") of those that the thread has begun and that are not done."""


class Here(NamedTuple):
    """What this process waits in."""

    verb: str
    since: float
    """Of `time.monotonic()`."""
    where: str = ""
    """The user's line, where the call has left it."""


class Whereabouts(NamedTuple):
    """Where all ranks are."""

    gone: list[int]
    """Those that have ended, or do not answer."""
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
        self.here: Here | None = None
        """The call of all ranks that this rank waits in, once it has waited for `PATIENCE`."""
        self.explain: Callable[[], Whereabouts] | None = None
        """Asks all ranks where they are; a watchdog's."""
        self.broken: str | None = None
        """The error of all ranks, once some wait for each other: no call of the job can be right any more."""
        self.can_raise = False
        """Whether a rank of those waits in a call of a guard, which raises."""
        self._stamp = 0
        self._lock = threading.Lock()  # the watchdog posts, too
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

    def leave(self, text: str = "") -> None:
        """Tell the others that this rank will make no call any more, and in `text` more of it."""
        self.store.set(f"left/{self.rank}", text)
        self.store.add("left", 1)

    def have_left(self, ranks: Iterable[int]) -> bool:
        """Whether any of these ranks has left."""
        return bool(self.store.add("left", 0)) and any([self.store.check([f"left/{rank}"]) for rank in ranks])

    def judge(self, store: JobStore | None = None) -> None:
        """Say so if this rank can never go on, unless another rank has just said it: see `broken`."""
        store = store or self.store
        if self.hear(store):
            return
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
        store.compare_set("verdict", "", text)
        self.hear(store)

    def read(self, store: JobStore | None = None) -> dict[int, Wait]:
        """Where each waiting rank stands."""
        texts = (store or self.store).get_all([f"at/{rank}" for rank in range(self.world_size)]).values()
        waits = [Wait(*json.loads(text)) for text in texts if text]
        return {wait.rank: wait for wait in waits}

    def hear(self, store: JobStore | None = None) -> bool:
        """Whether ranks wait for each other and can never go on, as one of them has written: `broken`."""
        store = store or self.store
        if self.broken is None and store.check(["verdict"]):
            from fabric.plugins.collectives.mismatch import mismatch_text

            waits = [Wait(*fields) for fields in json.loads(store.get("verdict"))]
            self.can_raise = any([wait.turn for wait in waits])
            self.broken = (
                f"{mismatch_text([wait.row() for wait in waits])}\nThey wait in different groups for each "
                "other, and none of them can go on: what one has begun the other has not come to. No further "
                "call of this job can be right."
            )
        return self.broken is not None


def latest() -> int:
    """The number of the last record: those of groups that come from now on have greater ones."""
    return max([entry["record_id"] for entry in flight_record()], default=-1)


def collectives_of(thread: int, after: int) -> Begun:
    """What this process has begun, and what one of its threads (or autograd for it) waits for, if it waits.

    Args:
        thread: Its identifier, as `threading.get_ident()` gives it.
        after: The last record of former groups, or of the process that this one was forked from: groups of
            later ones have the same names.
    """
    others = {str(one.ident) for one in threading.enumerate()} - {str(thread)}
    begun = Begun(dict.fromkeys(group_names(), 0), {})
    for entry in flight_record():
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if entry["is_p2p"] or entry["record_id"] <= after:
            continue
        if name not in begun.last:  # of a group that was destroyed
            continue
        begun.last[name] = max(number, begun.last[name])
        if not entry["retired"] and str(entry["thread_id"]) not in others:
            begun.pending.setdefault(name, []).append((number, entry["profiling_name"]))
    return begun
