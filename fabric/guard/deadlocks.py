"""Ranks that wait in different groups for each other: found through the store, and judged once for all of
them.

Within one group frames meet and a mismatch shows. Rank 0 in a call of the group (0, 1) and rank 1 in a call
of the world never meet: each waits for the other. A rank that has waited a while tells where it stands. Who
waits on a circle can never go on, and stays there; so whoever sees the circle first writes a verdict, which
all ranks that wait raise, now and at each later call. Costs nothing until a call has waited for `PATIENCE`.

A rank that stands still in torch's own collectives (a backward, the forward of a sharded model) makes no call
of ours; its watchdog tells for it which of them it has begun and waits for. If a rank that has not begun one
of these waits in a call that the first has not come to, they came in different orders, and neither goes on.
Nor do ranks whose collectives of one number are of different kinds. That is judged if nobody is on the way.

What is told may be a moment old by the time that it is read. That makes no wrong circle: who is on one cannot
have left it before the others.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.job_secret import secret_of
from fabric.guard._torch import flight_record, group_names
from fabric.guard.job_store import JobStore
from fabric.guard.messages import RankReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

LEFT, SILENT = "has left", "no answer"
"""In place of what a rank waits in."""
_VERDICT = "verdict"
"""The key of the error of all ranks, in this part of the store."""


class RankStatus(NamedTuple):
    """The published status of a rank: in a call of a guard, in torch's own collectives, or elsewhere."""

    rank: int
    host: str
    verb: str
    """What it waits in; "": in no call of all ranks."""
    what: str
    where: str
    since: float | None
    """Of its `time.monotonic()`; None: it does not wait."""
    counts: Mapping[str, int]
    """How many calls of each group it has come to."""
    group: str = ""
    turn: int = 0
    """It waits in this call of the group, counted from 1; 0: in none."""
    members: Sequence[int] = ()
    begun: Mapping[str, int] = {}
    """How many of torch's collectives it has begun in each group, where it waits."""
    pending: Mapping[str, Sequence[tuple[int, str]]] = {}
    """Number and kind of torch's collectives that it may wait for; none in a call of a guard."""
    told: float = 0.0
    """When, by its own clock; the last field."""

    def needs(self, other: RankStatus) -> bool:
        """Whether this wait cannot end before `other` has."""
        if self.turn:
            return other.rank in self.members and other.counts.get(self.group, 0) < self.turn
        for group in self.pending.keys() & other.begun.keys():
            theirs = dict(other.pending.get(group, []))
            for number, kind in self.pending[group]:
                if number > other.begun[group] or theirs.get(number, kind) != kind:
                    return True
        return False

    def row(self) -> RankReport:
        """Its line in the table of a mismatch."""
        of = f" of ranks {', '.join(map(str, self.members))}" if self.turn else ""
        return RankReport(self.rank, self.verb + of, self.what, self.where)


def stuck(waits: Mapping[int, RankStatus]) -> set[int]:
    """The ranks that can never go on: each waits for one that waits, and so on in a circle.

    A rank that is not in `waits` is on its way. Waiting ends when every member has come to the call.
    """
    held = set(waits)
    while True:
        moving = {rank for rank in held if not any([waits[rank].needs(waits[other]) for other in held])}
        if not moving:
            return held
        held -= moving


class DeadlockDetector:
    """This rank's view of where the ranks of the job wait.

    Args:
        store: The store of the default process group.
        rank: This process among all.
        world_size: How many processes there are.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.secret = JobStore("fabric/waits", store), secret_of(store)
        self.rank, self.world_size = rank, world_size
        self.counts: dict[str, int] = {}
        """How many calls of each group this rank has come to."""
        self.here: RankStatus | None = None
        """The call of all ranks that this rank waits in, once it has waited for `PATIENCE`."""
        self.explain: Callable[[], Mapping[int, RankStatus]] | None = None
        """Asks all ranks where they are; a watchdog's."""
        self.broken: str | None = None
        """The error of all ranks, once some wait for each other: no call of the job can be right any more."""
        self.home = threading.get_ident()
        self.thread: int | None = self.home
        self.last_thread: Any = self.home
        """That of the last call. `home` joined the job; `thread` makes calls without a look: threads.py."""
        self.can_raise = False
        """Whether a rank of those waits in a call of a guard, which raises."""
        self._told: RankStatus | None = None
        self._recorded = max([entry["record_id"] for entry in flight_record()], default=-1)
        self._judged = 0  # how many waits of all ranks had begun when this rank looked last
        self.store.set(f"at/{rank}", "")

    def stand(self, said: RankReport, since: float | None, **more: Any) -> RankStatus:
        """Return the status of this rank."""
        counts = dict(self.counts)
        return RankStatus(
            self.rank, socket.gethostname(), said.verb, said.what, said.where, since, counts, **more
        )

    def begun(self, thread: int) -> tuple[dict[str, int], dict[str, list[tuple[int, str]]]]:
        """Return the counts of torch's collectives by group, and the pending ones.

        A count has the collectives that this rank has begun since the job's group was made. Pending ones are
        the number and kind ("gloo:all_reduce") of those for which a thread, or autograd for it, may wait.
        Sends, receives and collectives from before a fork are left out.
        """
        others = {str(one.ident) for one in threading.enumerate()} - {str(thread)}
        last = dict.fromkeys(group_names(), 0)
        pending: dict[str, list[tuple[int, str]]] = {}
        for entry in flight_record():
            name, number = entry["process_group"][0], entry["collective_seq_id"]
            if entry["is_p2p"] or entry["record_id"] <= self._recorded or name not in last:
                continue  # groups of former jobs have the same names; others were destroyed
            last[name] = max(number, last[name])
            if not entry["retired"] and str(entry["thread_id"]) not in others:
                pending.setdefault(name, []).append((number, entry["profiling_name"]))
        return last, pending

    def tell(self, wait: RankStatus, store: JobStore | None = None) -> None:
        """Tell the others where this rank stands.

        Args:
            wait: There.
            store: This part of the job's store, for another thread.
        """
        store, fresh = store or self.store, wait != self._told
        key = f"at/{self.rank}"
        store.set(key, self.secret.sign(key, json.dumps(wait._replace(told=time.monotonic()))))
        if fresh and (wait.turn or wait.pending):
            store.add("begun", 1)
        self._told = wait

    def read(
        self, store: JobStore | None = None, ranks: Iterable[int] | None = None
    ) -> dict[int, RankStatus]:
        """Return the published statuses of all ranks, or of `ranks`."""
        keys = [f"at/{rank}" for rank in (range(self.world_size) if ranks is None else ranks)]
        found = (store or self.store).get_all(keys).items()
        texts = [self.secret.verified(key, data) for key, data in found if data]
        return {wait.rank: wait for wait in [RankStatus(*json.loads(text)) for text in texts if text]}

    def judge(self, store: JobStore | None = None) -> None:
        """Say so if this rank can never go on, unless another rank has just said it: see `broken`."""
        store = store or self.store
        if self.hear(store):
            return
        begun = store.add("begun", 0)
        if begun == self._judged:  # who was not stuck then is not stuck now
            return
        waits = {rank: wait for rank, wait in self.read(store).items() if wait.turn or wait.pending}
        held = stuck({rank: wait for rank, wait in waits.items() if wait.turn})
        if self.rank not in held:
            held = stuck(waits)  # nobody can be helped out of torch's collectives: only if all stand still
            if len(held) < self.world_size:
                self._judged = begun
                return
        again = self.read(store)  # who stood still between the two looks stood still at one time
        if any([again[rank][:-1] != waits[rank][:-1] for rank in held]):
            return
        self.publish([waits[rank] for rank in sorted(held)], store)
        self.hear(store)

    def publish(self, verdict: Any, store: JobStore) -> None:
        """Write a verdict for all ranks, unless one is there that a rank of this job has signed."""
        text = self.secret.sign(_VERDICT, json.dumps(verdict))
        if self.secret.verified(_VERDICT, store.compare_set(_VERDICT, "", text)) is None:
            store.set(_VERDICT, text)

    def hear(self, store: JobStore | None = None) -> bool:
        """Whether ranks wait for each other and can never go on, as one of them has written: `broken`."""
        store = store or self.store
        if self.broken is None and store.check([_VERDICT]):
            text = self.secret.verified(_VERDICT, store.get(_VERDICT))
            if text is None:  # a stranger's
                return False
            from fabric.guard.mismatch import mismatch_text

            verdict = json.loads(text)
            if isinstance(verdict, str):  # of two threads of a rank
                self.broken, self.can_raise = verdict, True
                return True
            waits = [RankStatus(*fields) for fields in verdict]
            self.can_raise = any([wait.turn for wait in waits])
            self.broken = (
                f"{mismatch_text([wait.row() for wait in waits])}\nThey wait in different groups for each "
                "other, and none of them can go on: what one has begun the other has not come to. No further "
                "call of this job can be right."
            )
        return self.broken is not None


def as_table(waits: Iterable[RankStatus]) -> str:
    """A line for each rank: where it is."""
    from fabric.guard.mismatch import aligned

    cells = [("rank", "host", "in", "for", "at")]
    for one in waits:
        seconds = "" if one.since is None else f"{one.told - one.since:.0f} s"
        cells.append((str(one.rank), one.host, one.verb or "no call of all ranks", seconds, one.where))
    return aligned(cells)
