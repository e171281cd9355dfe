"""Starts commands as ranks, watches them, ends them all when one fails. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from fabric.core.errors import LaunchError
from fabric.strategies.launchers.failure import Failure, from_returncode, root_cause, settle_seconds
from fabric.utilities.lifeline import LIFELINE_FD, PARENT_PID, REPORT_FD, die_with_parent, read_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fabric.strategies.launchers.rank_logs import RankLogs

STOP_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL for ranks that are stopped because another one failed."""
EXIT_NOTE_S = 10.0
"""Seconds after the normal end of one rank until it is said which others are still waited for."""
KILL_GRACE_S = 10.0
"""Seconds after SIGKILL in which a process has ended, unless the kernel holds it."""
_POLL_S = 0.05  # only where the system cannot tell us of a process's end


@dataclass(frozen=True, slots=True)
class Command:
    """One rank to start: its command line, its whole environment, the descriptors it inherits."""

    rank: int
    argv: list[str]
    env: dict[str, str]
    pass_fds: tuple[int, ...] = ()
    cwd: str | None = None
    stdin: bool = False
    """Whether this rank reads our standard input."""


class Supervisor:
    """The ranks of one machine, as child processes.

    Args:
        commands: What to start.
        own_sessions: Ranks get their own session, so that the terminal's Ctrl-C reaches only the supervisor,
            and are tied to this process before their first instruction; for a process without other threads.
            Otherwise they stay in the process group and tie themselves when they join the job.
        logs: Takes what the ranks print; None: it goes where this process prints.
        elsewhere: Whether the job has ranks on other machines.
    """

    def __init__(
        self,
        commands: list[Command],
        own_sessions: bool = False,
        logs: RankLogs | None = None,
        elsewhere: bool = False,
    ) -> None:
        self.commands = commands
        self.own_sessions = own_sessions
        self.elsewhere = elsewhere
        self.logs = logs
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.stopping = False
        self._reports: dict[int, tuple[int, bytes]] = {}
        # The kernel would take the end of a mere thread of ours for the end of this process.
        by_kernel = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        self._lifeline = None if by_kernel else os.pipe()
        self._told: set[int] = set()
        self._lock = threading.Lock()
        self._failures: dict[int, Failure] = {}

    def start(self) -> None:
        """Start all ranks.

        Raises:
            LaunchError: A command cannot be started; those started before are stopped again.
        """
        try:
            for command in self.commands:
                self.processes[command.rank] = self._start_one(command)
        except OSError as error:
            self.stop()
            raise LaunchError(f"Rank {command.rank} could not be started: {error}.") from error
        if self.logs is not None:
            self.logs.start()

    def running(self) -> list[int]:
        """Ranks whose process has not ended."""
        return [rank for rank, process in self.processes.items() if process.poll() is None]

    def wait(self, timeout: float | None = None, wake: Callable[[], bool] = lambda: False) -> Failure | None:
        """Block until a rank has failed, all have ended, `stop` was called or `timeout` seconds are over.

        Args:
            timeout: Seconds; None: no limit.
            wake: Asked after every signal and at least once per second; True ends the waiting.

        Returns:
            The failure that came first; None while nothing failed.
        """
        deadline = _deadline(timeout)
        while (
            not (self._look() or self.stopping or wake()) and self.running() and time.monotonic() < deadline
        ):
            self._sleep(deadline, reports=True)
        return None if wake() else self.first_failure()

    def wait_all(self, timeout: float) -> Failure | None:
        """Block until all have ended or `timeout` seconds are over; failures do not end the waiting."""
        deadline = _deadline(timeout)
        while self.running() and time.monotonic() < deadline:
            self._sleep(deadline)
        return self.first_failure()

    def first_failure(self) -> Failure | None:
        """The cause among the failures so far; looks a moment longer where only consequences are in sight."""
        deadline = _deadline(settle_seconds(self.elsewhere))
        while self._look() and not self.stopping and self.running() and time.monotonic() < deadline:
            if not root_cause(self._failures.values()).is_consequence:
                break
            self._sleep(deadline, reports=True)
        return root_cause(self._failures.values(), self.ended(well=True)) if self._failures else None

    def conclude(self, cause: Failure, also: Iterable[int] = ()) -> int:
        """Stop all ranks and print the cause, last; gives the exit code of the job.

        Args:
            cause: A failure.
            also: Ranks that stop because of it and are not ours.
        """
        self.stop(spare=cause.rank)
        if self.logs is not None:
            self.logs.close()  # what the ranks have printed comes before
        cause.tell({*also, *self._told}, self._failures.values(), self.elsewhere)
        process = self.processes.get(cause.rank)
        code = process.poll() if process is not None else None
        return code if code is not None and code > 0 else cause.code

    def stop(self, spare: int | None = None, grace: float = STOP_GRACE_S) -> list[int]:
        """End every rank: SIGTERM, `grace` seconds, SIGKILL. Returns the ranks that had to be told.

        Args:
            spare: A rank that is failing by itself and gets the grace to finish its traceback.
            grace: Seconds between the two signals.
        """
        self.tell(spare)
        deadline = _deadline(grace)
        while self.running() and time.monotonic() < deadline:
            self._sleep(deadline)
        self.send(signal.SIGKILL, self.running())
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands (a dead disk)
                process.wait(KILL_GRACE_S)
        return sorted(self._told)

    def tell(self, spare: int | None = None) -> None:
        """The first half of `stop`: SIGTERM to every rank that runs, but `spare`, without waiting."""
        self.stopping = True
        fresh = [rank for rank in self.running() if rank != spare and rank not in self._told]
        self._told.update(fresh)
        self.send(signal.SIGTERM, fresh)

    def send(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to the ranks that still run (all, or those named)."""
        for rank in self.processes if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                self.processes[rank].send_signal(number)

    def close(self) -> None:
        """Give the pipes back, after what came through them has been taken."""
        if self.logs is not None:
            self.logs.close()
        for descriptor, _ in self._reports.values():
            os.close(descriptor)
        self._reports.clear()
        for descriptor in self._lifeline or ():
            os.close(descriptor)
        self._lifeline = None

    def ended(self, well: bool) -> list[int]:
        """The ranks that have ended, well (exit code 0) or not."""
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        return [rank for rank, code in codes.items() if code is not None and (code == 0) == well]

    def _start_one(self, command: Command) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._reports[command.rank] = reader, b""
        env = {**command.env, PARENT_PID: str(parent), REPORT_FD: str(writer)}
        pass_fds = [*command.pass_fds, writer]
        if self._lifeline is not None:
            env[LIFELINE_FD] = str(self._lifeline[0])
            pass_fds.append(self._lifeline[0])
        tie: Callable[[], None] | None = (lambda: die_with_parent(parent)) if self._ties_early() else None
        stdin: int | IO[bytes] | None = None if command.stdin else subprocess.DEVNULL
        streams = (None, None) if self.logs is None else self.logs.streams(command.rank)
        try:
            return subprocess.Popen(
                command.argv,
                env=env,
                cwd=command.cwd,
                stdin=stdin,
                stdout=streams[0],
                stderr=streams[1],
                pass_fds=pass_fds,
                start_new_session=self.own_sessions,
                preexec_fn=tie,  # noqa: PLW1509  only in `fabric run`, which has one thread
            )
        finally:
            for descriptor in (writer, *streams):
                if descriptor is not None:
                    os.close(descriptor)

    def _ties_early(self) -> bool:
        return self.own_sessions and self._lifeline is None

    def _look(self) -> bool:
        """Take note of what has ended since; whether anything failed."""
        with self._lock:
            if not self.stopping:
                self._take_note()
            return bool(self._failures)

    def _take_note(self) -> None:
        # First who has ended: what they said before then is in the pipes.
        now, codes = time.monotonic(), {rank: process.poll() for rank, process in self.processes.items()}
        for rank, (descriptor, rest) in self._reports.items():
            reports, rest = read_reports(descriptor, rest)
            self._reports[rank] = descriptor, rest
            for report in reports:
                if self.logs is not None and report["trace"]:
                    self.logs.note(rank, report["trace"])
                self._failures.setdefault(
                    rank, Failure(rank, report["when"], report["reason"], trace=report["trace"])
                )
        for rank, code in codes.items():
            if code and rank not in self._failures:
                self._failures[rank] = from_returncode(rank, code, now)

    def _sleep(self, deadline: float, reports: bool = False) -> None:
        """Block until a process ends or the deadline is over; may return early.

        Args:
            deadline: Of `time.monotonic()`.
            reports: Whether a report ends it, too; for those who read them, else it would never block again.
        """
        remaining = max(0.0, deadline - time.monotonic())
        running = self.running()
        descriptors = process_descriptors([self.processes[rank].pid for rank in running])
        if descriptors is None:
            time.sleep(min(remaining, _POLL_S))
            return
        waiting = [self._reports[rank][0] for rank in running if reports and rank not in self._failures]
        with selectors.DefaultSelector() as selector:
            for descriptor in (*descriptors, *waiting):
                selector.register(descriptor, selectors.EVENT_READ)
            selector.select(min(remaining, 1.0))
        for descriptor in descriptors:
            os.close(descriptor)


def process_descriptors(pids: Iterable[int]) -> list[int] | None:
    """A descriptor per process that becomes readable when it ends; None where there is no such thing."""
    if not hasattr(os, "pidfd_open"):
        return None
    descriptors: list[int] = []
    try:
        for pid in pids:
            descriptors.append(os.pidfd_open(pid))
    except OSError:  # it ended just now, or the kernel is too old
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return descriptors


def _deadline(seconds: float | None) -> float:
    return float("inf") if seconds is None else time.monotonic() + seconds
