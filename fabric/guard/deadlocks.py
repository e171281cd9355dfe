"""Deadlocks across process groups: found through the store, reported by one verdict for all ranks.

Within one group, frames show a mismatch. Rank 0 in a call of the group (0, 1) and rank 1 in a call of the
world send no frame to each other: each waits for the other. So a rank publishes its status once it has waited
for `PATIENCE`. A rank in a cycle of waiting ranks waits forever. The rank that finds the cycle publishes a
verdict, which all waiting ranks raise, now and at each later call. A shorter wait causes no requests.

Once no further rank has started to wait for a while, one of the waiting ranks reads all statuses and searches
for a cycle. The others only poll for the verdict and the number of waits, whatever the number of ranks.

A rank that is blocked in torch's own collectives (a backward, the forward of a sharded model) makes no call
of this package. Its watchdog publishes which of them it has started and waits for. A rank that has not
started one of these may wait in a call that the first rank has not made. Then their orders differ, and both
wait forever. So do ranks whose collectives of one number are of different kinds. Such a deadlock is reported
only if all ranks wait.

A status may be outdated when it is read. This makes no false cycle: no rank of a cycle continues before
another one does.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections import Counter
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.job_secret import secret_of
from fabric.core.messages import ranks_text
from fabric.guard._torch import flight_record, group_names
from fabric.guard.job_store import JobStore
from fabric.guard.messages import RankReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    _Statuses = dict[int, "RankStatus"]

EXITED, SILENT = "exited", "no answer"
"""Texts in place of a verb, in the status of a rank."""
_VERDICT = "verdict"
"""Key in the store of the error of all ranks."""
_LONGEST_DELAY_S = 4.0
"""Seconds after which a rank searches for a cycle although further ranks start to wait."""


class RankStatus(NamedTuple):
    """The published status of a rank: in a call of a `CallChecker`, in torch's collectives, or elsewhere."""

    rank: int
    host: str
    verb: str
    """The call in which it waits; "": none."""
    what: str
    where: str
    since: float | None
    """Start of the wait by its `time.monotonic()`; None: it does not wait."""
    counts: Mapping[str, int]
    """Number of calls that it has started, by group."""
    group: str = ""
    number: int = 0
    """It waits in this call of the group, counted from 1; 0: in none."""
    started: Mapping[str, int] = {}
    """While it waits: number of torch's collectives that it has started, by group."""
    pending: Mapping[str, Sequence[tuple[int, str]]] = {}
    """Number and kind of torch's collectives that it may wait for; empty in a call of a `CallChecker`."""
    published: float = 0.0
    """Time of publication by its clock. The last field: comparisons leave it out."""

    def row(self, members: str) -> RankReport:
        """Return its row in the table of a mismatch; `members`: the ranks of the group."""
        of = f" of ranks {members}" if self.number else ""
        return RankReport(self.rank, self.verb + of, self.what, self.where)


def find_deadlocked(statuses: _Statuses, members: Mapping[str, Iterable[int]]) -> set[int]:
    """Return the ranks that wait forever: each waits for a rank that waits, up to a cycle.

    A call completes when every member has started it. A rank without a status may still start any call.

    Args:
        statuses: The waiting ranks.
        members: The ranks of each group in whose calls ranks wait.
    """
    needs, progress = _needs(statuses), _progress(statuses, members)
    blocked = set(statuses)
    while True:
        lowest = {
            point: min([count for rank, count in counts.items() if rank in blocked], default=math.inf)
            for point, counts in progress.items()
        }
        waiting = {(rank, *need) for rank in blocked for need in needs[rank]}
        still_blocked = {rank for rank, point, count in waiting if lowest[point] < count}
        if still_blocked == blocked:
            return blocked
        blocked = still_blocked


def _needs(statuses: _Statuses) -> dict[int, list[tuple[Any, float]]]:
    """Return (point, count) for each wait of a rank: it ends once all others have that count at the point.

    A point is a group's calls, or torch's collectives of a group.
    """
    found: dict[int, list[tuple[Any, float]]] = {}
    in_torch = {r: [(g, *one) for g, some in s.pending.items() for one in some] for r, s in statuses.items()}
    kinds = Counter([(g, number) for g, number, _ in {one for some in in_torch.values() for one in some}])
    for rank, status in statuses.items():
        found[rank] = [(("call", status.group), status.number)] if status.number else []
        for group, number, _ in in_torch[rank]:  # collectives of two kinds never complete
            found[rank].append((("torch", group), number if kinds[group, number] == 1 else math.inf))
    return found


def _progress(statuses: _Statuses, members: Mapping[str, Iterable[int]]) -> dict[Any, Any]:
    """Return the counts of ranks (a dict) by point."""
    found: dict[Any, dict[int, int]] = {}
    for group in {status.group for status in statuses.values() if status.number}:
        found["call", group] = {r: statuses[r].counts.get(group, 0) for r in members[group] if r in statuses}
    for rank, status in statuses.items():
        for group, count in status.started.items():
            found.setdefault(("torch", group), {})[rank] = count
    return found


class DeadlockDetector:
    """The statuses of all ranks of the job in the store, as one rank publishes and reads them.

    Args:
        store: The store of the default process group.
        rank: The global rank of this process.
        world_size: The number of processes.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store, self.secret = JobStore("fabric/waits", store), secret_of(store)
        self.rank, self.world_size = rank, world_size
        self.counts: dict[str, int] = {}
        """Number of calls that this rank has started, by group."""
        self.waiting: RankStatus | None = None
        """The call in which this rank waits, once it has waited for `PATIENCE`."""
        self.collect_statuses: Callable[[], Mapping[int, RankStatus]] | None = None
        """Requests new statuses from all ranks; set by a watchdog."""
        self.fatal_error: str | None = None
        """The error of each call of this rank from now on: a deadlock, or calls in a fork or two threads."""
        self.launch_thread = threading.get_ident()
        self.fast_path_thread: int | None = self.launch_thread
        """The thread whose calls need no look at other threads (threads.py)."""
        self.last_thread: Any = self.launch_thread
        """The thread of the last call."""
        self.can_raise = False
        """Whether a deadlocked rank waits in a call of a `CallChecker`, which raises."""
        self._last_status: RankStatus | None = None
        self._created_ns = time.time_ns(), time.monotonic_ns()
        self.members: dict[str, Sequence[int]] = {}
        """The ranks of the groups in whose calls this rank has waited."""
        self._published_groups: set[str] = set()  # whose members are in the store
        self._waits_seen = 0  # number of waits of all ranks at the last look
        self._unsearched_since: float | None = None  # since when no rank has searched the newest waits
        self.store.set(f"at/{rank}", "")

    def status(self, report: RankReport, since: float | None, **more: Any) -> RankStatus:
        """Return the status of this rank."""
        return RankStatus(self.rank, socket.gethostname(), *report[1:], since, dict(self.counts), **more)

    def torch_collectives(self, thread: int) -> tuple[dict[str, int], dict[str, list[tuple[int, str]]]]:
        """Return `started` and `pending` of a `RankStatus`.

        Counts start with the job's group. Pending are those for which `thread`, or autograd for it, may wait.
        The kind is torch's name, such as "gloo:all_reduce". Sends, receives, collectives from before a fork
        and those of a former job of this process are left out.
        """
        others = {str(one.ident) for one in threading.enumerate()} - {str(thread)}
        last = dict.fromkeys(group_names(), 0)
        pending: dict[str, list[tuple[int, str]]] = {}
        # Groups of former jobs of this process have the same names. The clock may have been set back since.
        since = min(self._created_ns[0], self._created_ns[1] - time.monotonic_ns() + time.time_ns())
        for entry in dropwhile(lambda entry: entry["time_created_ns"] < since, flight_record()):
            name, number = entry["process_group"][0], entry["collective_seq_id"]
            if entry["is_p2p"] or name not in last:  # of a group that was destroyed
                continue
            last[name] = max(number, last[name])
            if not entry["retired"] and str(entry["thread_id"]) not in others:
                pending.setdefault(name, []).append((number, entry["profiling_name"]))
        return last, pending

    def publish_status(self, status: RankStatus, store: JobStore | None = None) -> None:
        """Write the status of this rank to the store.

        Args:
            status: The status.
            store: A clone of `self.store`, in another thread.
        """
        store, changed = store or self.store, status != self._last_status
        key, group = f"at/{self.rank}", f"members/{status.group}"
        if status.number and group not in self._published_groups:  # once, and not in each status
            if not store.check([group]):
                store.set(group, self.secret.sign(group, json.dumps(self.members[status.group])))
            self._published_groups.add(group)
        store.set(key, self.secret.sign(key, json.dumps(status._replace(published=time.monotonic()))))
        if changed and (status.number or status.pending):
            store.add("begun", 1)
        self._last_status = status

    def read_statuses(self, ranks: Iterable[int] | None = None, store: JobStore | None = None) -> _Statuses:
        """Return the published statuses of all ranks, or of `ranks`."""
        keys = [f"at/{rank}" for rank in (range(self.world_size) if ranks is None else ranks)]
        found = (store or self.store).get_all(keys).items()
        texts = [self.secret.verified(key, data) for key, data in found if data]
        return {one.rank: one for one in [RankStatus(*json.loads(text)) for text in texts if text]}

    def detect_deadlock(self, store: JobStore | None = None) -> None:
        """Publish a verdict if ranks are deadlocked, unless another rank has searched the same waits."""
        store = store or self.store
        if self.poll_verdict(store):
            return
        waits, now = store.add("begun", 0), time.monotonic()
        last = store.compare_set("judged", "", "0 0")
        if last.partition(b" ")[0] == b"%d" % waits:  # searched: no rank has started to wait since
            self._unsearched_since = None
            return
        seen, self._waits_seen = self._waits_seen, waits
        self._unsearched_since = self._unsearched_since or now
        if waits != seen and now - self._unsearched_since < _LONGEST_DELAY_S:
            return
        claim = b"%d %d" % (waits, self.rank)
        if store.compare_set("judged", last.decode(), claim.decode()) == claim:
            while not self._search(store):
                pass
            self.poll_verdict(store)

    def _search(self, store: JobStore) -> bool:
        """Read all statuses, and publish a verdict if ranks are deadlocked; False: ranks moved meanwhile."""
        statuses = {r: one for r, one in self.read_statuses(store=store).items() if one.number or one.pending}
        keys = {f"members/{one.group}": one.group for one in statuses.values() if one.number}
        texts = {key: self.secret.verified(key, data) for key, data in store.get_all([*keys]).items()}
        members = {group: json.loads(texts.get(key) or "[]") for key, group in keys.items()}
        ranks = find_deadlocked({rank: one for rank, one in statuses.items() if one.number}, members)
        if not ranks:
            ranks = find_deadlocked(statuses, members)  # a rank cannot raise in torch's collectives:
            if len(ranks) < self.world_size:  # only if all ranks wait
                return True
        again = self.read_statuses(ranks, store)  # equal twice: they waited at the same time
        if any([rank not in again or again[rank][:-1] != statuses[rank][:-1] for rank in ranks]):
            return False
        from fabric.guard.mismatch import mismatch_text

        spans = {group: ranks_text(one) for group, one in members.items()}
        rows = [statuses[rank].row(spans.get(statuses[rank].group, "")) for rank in sorted(ranks)]
        text = (
            f"{mismatch_text(rows)}\nThese ranks wait for each other in different groups: each waits for a "
            "call that another has not made. None can continue. Later calls of this job raise this error too."
        )
        self.publish_verdict(text, any([statuses[rank].number for rank in ranks]), store)
        return True

    def publish_verdict(self, text: str, can_raise: bool, store: JobStore) -> None:
        """Write a verdict for all ranks, unless a rank of this job has signed one before.

        Args:
            text: The error of all ranks.
            can_raise: As in this class.
            store: `self.store` or a clone of it.
        """
        signed = self.secret.sign(_VERDICT, json.dumps([text, can_raise]))
        if self.secret.verified(_VERDICT, store.compare_set(_VERDICT, "", signed)) is None:
            store.set(_VERDICT, signed)

    def poll_verdict(self, store: JobStore | None = None) -> bool:
        """Whether a rank has published a verdict; sets `fatal_error`."""
        store = store or self.store
        if self.fatal_error is None and store.check([_VERDICT]):
            text = self.secret.verified(_VERDICT, store.get(_VERDICT))
            if text is not None:  # None: written by a process without the secret
                self.fatal_error, self.can_raise = json.loads(text)
        return self.fatal_error is not None


def status_table(statuses: Iterable[RankStatus]) -> str:
    """Return a line per rank: where it is."""
    from fabric.guard.mismatch import align_columns

    cells = [("rank", "host", "in", "for", "at")]
    for one in statuses:
        seconds = "" if one.since is None else f"{one.published - one.since:.0f} s"
        cells.append((str(one.rank), one.host, one.verb or "no call of all ranks", seconds, one.where))
    return align_columns(cells)
