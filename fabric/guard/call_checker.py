"""`CallChecker`: compares the calls of a group's ranks before each collective, over their own connections.

The ranks exchange one frame each (messages.py, control_connections.py). If the frames differ, all ranks raise
the same error and the group stays usable. Small host tensors are sent in the frame, and need no collective.
Deadlocked ranks (deadlocks.py) raise one error, too, and again at every later call of the job.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from fabric.collectives.frames import IN_THREAD
from fabric.core.errors import CollectiveMismatch, ConfigurationError, RankError
from fabric.core.job_secret import VARIABLE
from fabric.core.messages import name_ranks
from fabric.core.source import user_line
from fabric.guard._torch import group_timeout
from fabric.guard.control_connections import (
    FAN_OUT,
    PATIENCE,
    ControlConnections,
    ControlRound,
    Listener,
    connect,
    neighbours,
)
from fabric.guard.deadlocks import EXITED, SILENT, DeadlockDetector, RankStatus, status_table
from fabric.guard.job_store import StoreTimeout
from fabric.guard.messages import CALL_BYTES, KEY_BYTES, GatheredFrames, RankReport, combiner, make_frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from fabric.collectives.channel import Channel
    from fabric.collectives.frames import CallSignature

MODES = ("full", "light", "off")
GATHER_UP_TO = 16
"""Most ranks of a group in which each rank receives the data of all frames: 2 MiB through the first one.
Larger groups reduce a few bytes in their frames (`combiner`)."""

_guards: weakref.WeakKeyDictionary[Any, CallChecker | None] = weakref.WeakKeyDictionary()
_detectors: weakref.WeakKeyDictionary[Any, DeadlockDetector] = weakref.WeakKeyDictionary()


def guard_of(group: Any) -> CallChecker | None:
    """Return the call checker of a torch process group; None: one rank, or FABRIC_GUARD=off on all ranks."""
    if group not in _guards:
        mode = os.environ.get("FABRIC_GUARD", "full")
        _guards[group] = CallChecker(group, mode) if dist.get_world_size(group) > 1 else None
    return _guards[group]


def job_detector() -> DeadlockDetector:
    """Return the deadlock detector of this rank, on the store of torch's default group."""
    world: Any = dist.group.WORLD
    if world not in _detectors:
        _detectors[world] = DeadlockDetector(world.get_group_store(), dist.get_rank(), dist.get_world_size())
    return _detectors[world]


def _refuse_calls_after_fork() -> None:
    for detector in _detectors.values():
        detector.fatal_error = (
            f"fabric was called in a process that rank {detector.rank} forked (a worker of a DataLoader?), "
            "and that is not a rank. Make the call in the loop."
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_calls_after_fork)


class StoreBarrier:
    """A barrier through the store, for the first call of a group, which has no connections yet.

    Args:
        detector: The deadlock detector of this rank.
        name: The name of the barrier. Ranks may use it several times, all of them equally often.
        members: Its ranks. The first one reads the texts of all ranks; the others read its answer.
    """

    reason = "it was the first call of the group"
    """Part of the error if a rank is missing."""

    def __init__(self, detector: DeadlockDetector, name: str, members: Sequence[int]) -> None:
        self.name, self.members = name, members
        self.number = detector.counts.get(name, 0) + 1
        self._store, self._secret, self._prefix = detector.store, detector.secret, f"{name}/{self.number}"
        self._rank, self.is_first = detector.rank, detector.rank == members[0]
        self._pause = 0.0005

    def arrive(self, rank: int, text: str = "") -> None:
        """Publish that this rank arrived, with a text for the first rank."""
        self._write(f"{self._prefix}/{rank}", text)
        self._store.add(self._prefix, 1)  # polled by the first rank: one key, and not N

    def answer(self, text: str) -> None:
        """Publish the answer of the first rank to all others."""
        self._write(f"{self._prefix}/all", text)

    def missing(self) -> set[int]:
        """The members that have not arrived."""
        arrived = self._store.get_all([f"{self._prefix}/{rank}" for rank in self.members])
        return {*self.members} - {int(key.rpartition("/")[2]) for key in arrived}

    def texts_of(self, names: Sequence[Any]) -> list[str]:
        """Return the texts of these ranks, or of the answer to "all"; raises ConfigurationError if a secret
        differs.
        """
        keys = [f"{self._prefix}/{name}" for name in names]
        texts = self._store.get_all(keys)
        found = [self._secret.verified(key, texts.get(key, b"")) for key in keys]
        wrong = [str(name) for name, text in zip(names, found, strict=True) if text is None]
        if wrong:
            ranks = ", ".join(wrong).replace("all", str(self.members[0]))
            raise ConfigurationError(
                f"{VARIABLE} of rank {self._rank} is not that of rank {ranks}. Ranks with different secrets "
                "do not connect. Export one value of it on all machines, or none."
            )
        return [text for text in found if text is not None]

    def connection_key(self, port: int) -> bytes:
        """Return the key of the connections to this port of a rank."""
        return self._secret.proof(b"connections", self._prefix.encode(), b"%d" % port)

    def withdraw(self, rank: int) -> None:
        """Undo `arrive`: this rank may arrive again."""
        self._store.add(self._prefix, -1)
        self._store.delete_key(f"{self._prefix}/{rank}")

    def wait(self, seconds: float) -> bool:
        """Whether all members arrived within `seconds`; except on the first rank: whether it answered."""
        end = time.monotonic() + seconds
        while True:
            with suppress(StoreTimeout):  # until the timeout of the call
                arrived = self.is_first and self._store.add(self._prefix, 0) >= len(self.members)
                if arrived or (not self.is_first and self._store.check([f"{self._prefix}/all"])):
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(self._pause)
            self._pause = min(1.5 * self._pause, 0.05)

    def _write(self, key: str, text: str) -> None:
        self._store.set(key, self._secret.sign(key, text))


class CallChecker:
    """The check of calls before each collective of one process group (`Channel.check_call`).

    If a rank is missing, or the calls differ, all ranks raise. Made by `guard_of`.
    """

    fan_out, gather_up_to = FAN_OUT, GATHER_UP_TO

    def __init__(self, group: Any, mode: str) -> None:
        self.name: str = group.group_name
        self.members: list[int] = dist.get_process_group_ranks(group)
        self.mode = mode
        self._group = weakref.ref(group)
        self.detector = job_detector()
        self.detector.counts.setdefault(self.name, 0)
        self.timeout = timeout_of(group)
        self.connections: ControlConnections | None = None
        self.gathers_data = mode == "full" and len(self.members) <= min(self.gather_up_to, 1 + self.fan_out)
        """Whether all ranks receive the data in the frames."""
        self.reduces_data = mode == "full" and not self.gathers_data
        """Whether a few bytes of data are reduced in the frames (`combiner`)."""

    @property
    def count(self) -> int:
        """The number of calls of the group that this rank has started."""
        return self.detector.counts[self.name]

    def compare(
        self, call: CallSignature, payload: Sequence[Tensor], channel: Channel, op: Any = None
    ) -> GatheredFrames | None:
        """Exchange frames with all ranks of the group, and compare them; see `Channel.check_call`.

        Raises:
            CollectiveMismatch: Ranks make different calls; raised on all of them.
            RankError: A rank exited, or did not make the call in time.
        """
        if self.detector.fatal_error is not None:
            raise CollectiveMismatch(self.detector.fatal_error)
        compiling = torch.compiler.is_compiling()
        if not compiling and threading.get_ident() != self.detector.fast_path_thread:
            from fabric.guard.threads import with_thread

            call = with_thread(call, self.detector)
        connections = self.connections or self.open(call)
        if connections is None:
            return None
        compared, counts = None if compiling else channel.facts, self.detector.counts
        facts = b"" if compared is None else compared.facts()
        combine = combiner(payload, op, connections.is_star) if self.reduces_data else None
        frame = make_frame(counts[self.name] + 1, call, payload, self.gathers_data or bool(combine), facts)
        counts[self.name] += 1  # last: no error between it and the frame
        control_round = connections.start(frame, KEY_BYTES, combine)
        try:
            done = control_round.wait()
        except ConnectionError:  # raised again in `wait`
            done = False
        if not done:
            self.wait(control_round, call, 0.0)
        if not control_round.starts_equal(KEY_BYTES):
            if compared is None or not control_round.starts_equal(CALL_BYTES):
                self.raise_mismatch(connections, call)
            compared.differ(channel)
            if combine:  # the frames differed, and were not combined
                return None
        if self.gathers_data:
            return GatheredFrames(control_round.rows, control_round.row_bytes, len(self.members))
        return GatheredFrames(control_round.rows, control_round.row_bytes, 1) if combine else None

    def raise_mismatch(self, connections: ControlConnections, call: CallSignature) -> NoReturn:
        """Exchange the reports of all ranks, whose calls differ, and raise the same error on each."""
        from fabric.guard import mismatch

        control_round = connections.start(mismatch.encode_report(self._report(call)))
        self.wait(control_round, call)
        rows = control_round.rows_by_rank(len(self.members))
        decoded = {row: mismatch.decode_report(0, row) for row in {*rows}}
        reports = [decoded[row]._replace(rank=rank) for rank, row in zip(self.members, rows, strict=True)]
        text = mismatch.mismatch_text(reports)
        if len({report.verb.partition(IN_THREAD)[2] for report in reports}) > 1:
            self.detector.fatal_error = text  # other threads continue, with another order on each rank
        raise CollectiveMismatch(text)

    def open(self, call: CallSignature) -> ControlConnections | None:
        """Connect the ranks of the group, in its first call; None: FABRIC_GUARD=off."""
        detector, group_rank = self.detector, self.members.index(self.detector.rank)
        barrier = StoreBarrier(detector, f"open {self.name}", self.members)
        parent, subtrees = neighbours(group_rank, len(self.members), self.fan_out)
        children = [subtree.start for subtree in subtrees]
        with Listener(children, detector.store.interface) if children else nullcontext() as listener:
            port = listener.port if listener else 0
            barrier.arrive(detector.rank, f"{self.mode} {detector.store.address} {port}")
            try:
                self.wait(barrier, call)
            except KeyboardInterrupt:  # the user may repeat the call
                barrier.withdraw(detector.rank)
                detector.counts[barrier.name] -= 1
                raise
            self._check_modes(barrier)
            if self.mode == "off":
                _guards[self._group()] = None
                return None
            to_parent = None if parent is None else self._connect(barrier, group_rank, parent)
            host = detector.store.reach(detector.store.address)
            with _connection_errors("the ranks after it", detector.rank, host, port):
                to_children = listener.accept(barrier.connection_key(port)) if listener else []
        self.connections = ControlConnections(to_parent, to_children, self.members, group_rank, self.fan_out)
        return self.connections

    def _connect(self, barrier: StoreBarrier, group_rank: int, parent: int) -> Any:
        """Return the connection to the parent."""
        rank = self.members[parent]
        _, address, port = barrier.texts_of([rank])[0].split(" ")
        host = self.detector.store.reach(address)
        with _connection_errors(f"rank {self.detector.rank}", rank, host, int(port)):
            return connect(group_rank, parent, host, int(port), barrier.connection_key(int(port)))

    def _check_modes(self, barrier: StoreBarrier) -> None:
        """Raise on all ranks if the first one finds that their FABRIC_GUARD or secrets differ."""
        if not barrier.is_first:
            (error_text,) = barrier.texts_of(["all"])
            if error_text:
                raise ConfigurationError(error_text)
            return
        try:
            modes = [text.partition(" ")[0] for text in barrier.texts_of(self.members)]
            if len({*modes}) > 1 or self.mode not in MODES:
                each = [f"{mode} on rank {rank}" for rank, mode in zip(self.members, modes, strict=True)]
                raise ConfigurationError(
                    f"FABRIC_GUARD must be one of {', '.join(MODES)} and the same on all ranks, but is "
                    f"{', '.join(each)}."
                )
        except ConfigurationError as error:
            barrier.answer(str(error))
            raise
        barrier.answer("")

    def wait(self, point: StoreBarrier | ControlRound, call: CallSignature, after: float = PATIENCE) -> None:
        """Wait for the other ranks; `after` so many seconds, publish the wait and look for deadlocks.

        Raises:
            CollectiveMismatch: Ranks wait for each other in different calls.
            RankError: A rank exited, or did not make the call in time.
        """
        if isinstance(point, StoreBarrier):
            self.detector.counts[point.name] = point.number
        try:
            if not point.wait(after):
                self._wait_long(point, call)
        except CollectiveMismatch:
            raise
        except (RuntimeError, ConnectionError) as error:
            if isinstance(point, ControlRound) and self.connections is not None:
                self.connections.close(str(error))
            with suppress(RuntimeError):  # the rank that exited may host the store
                self.detector.poll_verdict()
            if self.detector.fatal_error is not None:
                raise CollectiveMismatch(self.detector.fatal_error) from error
            raise RankError(self._failure_text(call, error, point)) from error
        finally:
            if self.detector.waiting is not None:
                self.detector.waiting = None
                with suppress(RuntimeError):
                    self.detector.publish_status(self.detector.status(RankReport(self.detector.rank), None))

    def _wait_long(self, point: StoreBarrier | ControlRound, call: CallSignature) -> None:
        detector, contact = self.detector, time.monotonic()
        # Seconds between requests: the store serves all ranks.
        longest = min(3.0, max(1.0, detector.world_size / 256))
        seconds = 0.2 * longest
        detector.waiting = self._status(point, call, contact - PATIENCE)
        while not point.wait(seconds):
            with suppress(StoreTimeout):  # the call may complete all the same
                detector.publish_status(detector.waiting)
                detector.detect_deadlock()
            if detector.fatal_error is not None:
                raise CollectiveMismatch(detector.fatal_error)
            contact = self._last_contact(point, call, contact)
            seconds = min(1.5 * seconds, longest)

    def _status(self, point: StoreBarrier | ControlRound, call: CallSignature, since: float) -> RankStatus:
        detector, group = self.detector, point.name if isinstance(point, StoreBarrier) else self.name
        started, _ = detector.torch_collectives(threading.get_ident())
        detector.members[group] = self.members
        number = detector.counts[group]
        return detector.status(self._report(call), since, group=group, number=number, started=started)

    def _last_contact(self, point: StoreBarrier | ControlRound, call: CallSignature, contact: float) -> float:
        """Return the time of the last answer of missing ranks; raises RuntimeError if it is too long ago."""
        limit, now = self.timeout.total_seconds() - PATIENCE, time.monotonic()
        with suppress(StoreTimeout):
            if isinstance(point, StoreBarrier):
                found = self.detector.read_statuses(point.missing() if point.is_first else self.members[:1])
                limit = 0.0 if any([one.verb == EXITED for one in found.values()]) else limit
            elif call.patient and now - contact > limit / 2 and self.detector.collect_statuses:
                statuses = self.detector.collect_statuses()
                if not any([statuses[rank].verb in (EXITED, SILENT) for rank in self.members]):
                    return time.monotonic()
        if now - contact > limit:
            raise RuntimeError(point.reason)
        return contact

    def _report(self, call: CallSignature) -> RankReport:
        return RankReport(self.detector.rank, f"{call.verb} #{max(self.count, 1)}", call.what, user_line())

    def _failure_text(self, call: CallSignature, error: Exception, point: StoreBarrier | ControlRound) -> str:
        """Return the error for ranks that exited or are missing, with the statuses of all ranks."""
        detector, reason = self.detector, reason_of(error)
        detector.store.await_host_exit()
        detector.waiting = detector.waiting or self._status(point, call, time.monotonic())
        lost = self.connections.lost if self.connections and isinstance(point, ControlRound) else None
        statuses: Mapping[int, RankStatus] = {}
        missing = set[int]()
        try:
            statuses = detector.collect_statuses() if detector.collect_statuses else detector.read_statuses()
            arrived = {rank for rank, one in statuses.items() if one.counts.get(self.name, 0) >= self.count}
            missing = point.missing() if isinstance(point, StoreBarrier) else {*self.members} - arrived
        except StoreTimeout as timeout:
            reason = f"{reason}; {timeout}"
        except Exception:  # the rank that hosted the store exited
            pass
        ended = {rank for rank, one in statuses.items() if one.verb in (EXITED, SILENT)} | {lost}
        ended_members = [rank for rank in self.members if rank in ended]
        others = missing - {detector.rank}
        text = f"{call.verb} at {user_line()} failed on rank {detector.rank}: "
        if ended_members:
            verb = "do" if len(ended_members) > 1 else "does"
            text += f"{name_ranks(ended_members)} ended, or {verb} not answer ({reason})."
        else:
            who = name_ranks(others) if others else "a rank of the group"
            text += f"{who} ended, or did not join within {self.timeout.total_seconds():.0f} s ({reason})."
        shown = [one for one in statuses.values() if one.verb or detector.collect_statuses]
        return f"{text}\nWhere the ranks are:\n{status_table(shown)}" if shown else text


@contextmanager
def _connection_errors(who: str, rank: int, host: str, port: int) -> Iterator[None]:
    """Raise RankError in place of an OSError of the block, in which ranks connect."""
    try:
        yield
    except OSError as error:
        raise RankError(
            "Ranks of a group compare their calls through their own connections, and "
            f"{who} did not reach rank {rank} at {host}:{port} ({reason_of(error)}). Did it end, or was its "
            "call interrupted? Otherwise open the ports between the machines, or name the network interface "
            "that leads to the others (GLOO_SOCKET_IFNAME=eth0). With FABRIC_GUARD=off ranks do not connect, "
            "but calls that differ hang."
        ) from error


def reason_of(error: Exception) -> str:
    """Return the message of a backend's error, without its source location and advice."""
    lines = str(error).rpartition("cc:")[2].rpartition("] ")[2].splitlines() or [""]
    return lines[0].partition(". This is typically")[0] or type(error).__name__


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of the group's collectives."""
    found = [timeout for kind in ("cpu", "cuda") if (timeout := group_timeout(group, kind)) is not None]
    return found[0] if found else timedelta(minutes=30)
