"""Ranks that wait in different groups for each other: found through the store, and judged once for all of
them.

Within one group frames meet and a mismatch shows. Rank 0 in a call of the group (0, 1) and rank 1 in a call
of the world never meet: each waits for the other. A rank that has waited a while tells where it stands. Who
waits on a circle can never go on, and stays there; so whoever sees the circle first writes a verdict, which
all ranks that wait raise, now and at each later call. Costs nothing until a call has waited for `PATIENCE`.

Once no further rank has begun to wait for a while, one of those that wait reads what all have told, and
judges. The others ask for the verdict only, and for how many waits have begun, however many ranks there are.

A rank that stands still in torch's own collectives (a backward, the forward of a sharded model) makes no call
of ours; its watchdog tells for it which of them it has begun and waits for. If a rank that has not begun one
of these waits in a call that the first has not come to, they came in different orders, and neither goes on.
Nor do ranks whose collectives of one number are of different kinds. That is judged if nobody is on the way.

What is told may be a moment old by the time that it is read. That makes no wrong circle: who is on one cannot
have left it before the others.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections import Counter
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
_UNSETTLED_S = 4.0
"""Seconds after which one judges though further ranks begin to wait."""


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
    begun: Mapping[str, int] = {}
    """How many of torch's collectives it has begun in each group, where it waits."""
    pending: Mapping[str, Sequence[tuple[int, str]]] = {}
    """Number and kind of torch's collectives that it may wait for; none in a call of a guard."""
    told: float = 0.0
    """When, by its own clock; the last field."""

    def row(self, members: str) -> RankReport:
        """Its line in the table of a mismatch, with the members of the group."""
        of = f" of ranks {members}" if self.turn else ""
        return RankReport(self.rank, self.verb + of, self.what, self.where)


def stuck(waits: Mapping[int, RankStatus], members: Mapping[str, Iterable[int]]) -> set[int]:
    """The ranks that can never go on: each waits for one that waits, and so on in a circle.

    A rank that is not in `waits` is on its way. Waiting ends when every member has come to the call.

    Args:
        waits: By rank.
        members: Of each group in whose calls ranks wait.
    """
    needs, come = _needs(waits), _how_far(waits, members)
    held = set(waits)
    while True:
        lowest = {
            point: min([level for rank, level in levels.items() if rank in held], default=math.inf)
            for point, levels in come.items()
        }
        waiting = {(rank, *need) for rank in held for need in needs[rank]}
        stays = {rank for rank, point, level in waiting if lowest[point] < level}
        if stays == held:
            return held
        held = stays


def _needs(waits: Mapping[int, RankStatus]) -> dict[int, list[tuple[Any, float]]]:
    """Return the points to which all others must have come before each rank's wait can end, and how far."""
    found: dict[int, list[tuple[Any, float]]] = {}
    torchs = {r: [(g, *one) for g, some in wait.pending.items() for one in some] for r, wait in waits.items()}
    kinds = Counter([(g, number) for g, number, _ in {one for some in torchs.values() for one in some}])
    for rank, wait in waits.items():
        found[rank] = [(("call", wait.group), wait.turn)] if wait.turn else []
        for g, number, _ in torchs[rank]:  # collectives of two kinds never end
            found[rank].append((("torch", g), number if kinds[g, number] == 1 else math.inf))
    return found


def _how_far(
    waits: Mapping[int, RankStatus], members: Mapping[str, Iterable[int]]
) -> dict[Any, dict[int, int]]:
    """Return how far each rank has come, by point."""
    found: dict[Any, dict[int, int]] = {}
    for group in {wait.group for wait in waits.values() if wait.turn}:
        found["call", group] = {r: waits[r].counts.get(group, 0) for r in members[group] if r in waits}
    for rank, wait in waits.items():
        for group, begun in wait.begun.items():
            found.setdefault(("torch", group), {})[rank] = begun
    return found


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
        self.members: dict[str, Sequence[int]] = {}
        """Of the groups in whose calls this rank has waited."""
        self._published: set[str] = set()  # of these, whose members are in the store
        self._begun = 0  # how many waits of all ranks had begun when this rank looked last
        self._changed: float | None = None  # since when nobody has judged those that have begun
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
        key, group = f"at/{self.rank}", f"members/{wait.group}"
        if wait.turn and group not in self._published:  # once, and not in each status
            if not store.check([group]):
                store.set(group, self.secret.sign(group, json.dumps(self.members[wait.group])))
            self._published.add(group)
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
        """Write a verdict if ranks can never go on, unless another rank judges these waits: see `broken`."""
        store = store or self.store
        if self.hear(store):
            return
        begun, now = store.add("begun", 0), time.monotonic()
        last = store.compare_set("judged", "", "0 0")
        if last.partition(b" ")[0] == b"%d" % begun:  # who was not stuck then is not stuck now
            self._changed = None
            return
        self._changed, before, self._begun = self._changed or now, self._begun, begun
        if begun != before and now - self._changed < _UNSETTLED_S:
            return
        own = b"%d %d" % (begun, self.rank)
        if store.compare_set("judged", last.decode(), own.decode()) == own:
            while self._finds(store):
                pass
            self.hear(store)

    def _finds(self, store: JobStore) -> bool:
        """Read what all ranks have told, and judge; whether ranks have moved meanwhile."""
        waits = {rank: wait for rank, wait in self.read(store).items() if wait.turn or wait.pending}
        keys = {f"members/{wait.group}": wait.group for wait in waits.values() if wait.turn}
        texts = {key: self.secret.verified(key, data) for key, data in store.get_all([*keys]).items()}
        members = {group: json.loads(texts.get(key) or "[]") for key, group in keys.items()}
        held = stuck({rank: wait for rank, wait in waits.items() if wait.turn}, members)
        if not held:
            held = stuck(waits, members)  # nobody can be helped out of torch's collectives:
            if len(held) < self.world_size:  # only if all stand still
                return False
        again = self.read(store, held)  # who stood still between the two looks stood still at one time
        if any([rank not in again or again[rank][:-1] != waits[rank][:-1] for rank in held]):
            return True
        from fabric.guard.mismatch import as_spans, mismatch_text

        names = {group: as_spans(ranks) for group, ranks in members.items()}
        table = mismatch_text([waits[rank].row(names.get(waits[rank].group, "")) for rank in sorted(held)])
        text = (
            f"{table}\nThey wait in different groups for each other, and none of them can go on: what one "
            "has begun the other has not come to. No further call of this job can be right."
        )
        self.publish(text, any([waits[rank].turn for rank in held]), store)
        return False

    def publish(self, text: str, can_raise: bool, store: JobStore) -> None:
        """Write a verdict for all ranks, unless one is there that a rank of this job has signed.

        Args:
            text: The error of all ranks.
            can_raise: As of this class.
            store: This part of the job's store.
        """
        signed = self.secret.sign(_VERDICT, json.dumps([text, can_raise]))
        if self.secret.verified(_VERDICT, store.compare_set(_VERDICT, "", signed)) is None:
            store.set(_VERDICT, signed)

    def hear(self, store: JobStore | None = None) -> bool:
        """Whether ranks wait for each other and can never go on, as one of them has written: `broken`."""
        store = store or self.store
        if self.broken is None and store.check([_VERDICT]):
            text = self.secret.verified(_VERDICT, store.get(_VERDICT))
            if text is None:  # a stranger's
                return False
            self.broken, self.can_raise = json.loads(text)
        return self.broken is not None


def as_table(waits: Iterable[RankStatus]) -> str:
    """A line for each rank: where it is."""
    from fabric.guard.mismatch import aligned

    cells = [("rank", "host", "in", "for", "at")]
    for one in waits:
        seconds = "" if one.since is None else f"{one.told - one.since:.0f} s"
        cells.append((str(one.rank), one.host, one.verb or "no call of all ranks", seconds, one.where))
    return aligned(cells)
