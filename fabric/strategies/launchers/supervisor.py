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
from fabric.strategies.launchers.failure import SETTLE_S, Failure, from_returncode, root_cause
from fabric.utilities.lifeline import PARENT_PID, REPORT_FD, die_with_parent, read_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STOP_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for ranks that are stopped because another one failed."""
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
    """

    def __init__(self, commands: list[Command], own_sessions: bool = False) -> None:
        self.commands = commands
        self.own_sessions = own_sessions
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.stopping = False
        self._reports, self._writer = os.pipe()
        os.set_blocking(self._reports, False)
        self._rest = b""
        self._told: set[int] = set()
        self._lock = threading.Lock()
        self._reasons: dict[int, tuple[float, str]] = {}
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
        finally:
            os.close(self._writer)

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
            self._sleep(deadline)
        return None if wake() else self.first_failure()

    def wait_all(self, timeout: float) -> Failure | None:
        """Block until all have ended or `timeout` seconds are over; failures do not end the waiting."""
        deadline = _deadline(timeout)
        while self.running() and time.monotonic() < deadline:
            self._sleep(deadline)
        return self.first_failure()

    def first_failure(self) -> Failure | None:
        """The cause among the failures so far; looks a moment longer where only consequences are in sight."""
        deadline = _deadline(SETTLE_S)
        while self._look() and not self.stopping and self.running() and time.monotonic() < deadline:
            if not root_cause(list(self._failures.values())).is_consequence:
                break
            self._sleep(deadline)
        return root_cause(list(self._failures.values())) if self._failures else None

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
            process.wait()
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

    def exit_code(self, failure: Failure) -> int:
        """What the job exits with because of `failure`: that rank's own code where it has ended by itself."""
        process = self.processes.get(failure.rank)
        code = process.poll() if process is not None else None
        return code if code is not None and code > 0 else failure.code

    def close(self) -> None:
        """Give the report pipe back."""
        with contextlib.suppress(OSError):
            os.close(self._reports)

    def _start_one(self, command: Command) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        env = {**command.env, PARENT_PID: str(parent), REPORT_FD: str(self._writer)}
        if threading.current_thread() is not threading.main_thread():
            del env[PARENT_PID]  # the kernel would take the end of this thread for the end of the parent
        tie: Callable[[], None] | None = (lambda: die_with_parent(parent)) if self._ties_early() else None
        stdin: int | IO[bytes] | None = None if command.stdin else subprocess.DEVNULL
        return subprocess.Popen(
            command.argv,
            env=env,
            cwd=command.cwd,
            stdin=stdin,
            pass_fds=(*command.pass_fds, self._writer),
            start_new_session=self.own_sessions,
            preexec_fn=tie,  # noqa: PLW1509  only in `fabric run`, which has one thread
        )

    def _ties_early(self) -> bool:
        return self.own_sessions and sys.platform == "linux"

    def _look(self) -> bool:
        """Take note of what has ended since; whether anything failed."""
        with self._lock:
            if not self.stopping:
                self._take_note()
            return bool(self._failures)

    def _take_note(self) -> None:
        with contextlib.suppress(OSError):
            reports, self._rest = read_reports(self._reports, self._rest)
            for report in reports:
                self._reasons.setdefault(report["rank"], (report["when"], report["reason"]))
        for rank, (when, reason) in self._reasons.items():
            self._failures.setdefault(rank, Failure(rank, when, reason))
        now = time.monotonic()
        for rank, process in self.processes.items():
            code = process.poll()
            if code and rank not in self._failures:
                self._failures[rank] = from_returncode(rank, code, now)

    def _sleep(self, deadline: float) -> None:
        """Block until a process ends, a report comes or the deadline is over; may return early."""
        remaining = max(0.0, deadline - time.monotonic())
        descriptors = _process_descriptors(
            process.pid for process in self.processes.values() if process.poll() is None
        )
        if descriptors is None:
            time.sleep(min(remaining, _POLL_S))
            return
        with selectors.DefaultSelector() as selector:
            for descriptor in descriptors:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.select(min(remaining, 1.0))
        for descriptor in descriptors:
            os.close(descriptor)


def _process_descriptors(pids: Iterable[int]) -> list[int] | None:
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
