"""`Supervisor`: starts ranks, watches them, and stops them all when one fails. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Pipe, wait
from typing import TYPE_CHECKING, Any

from fabric.core.errors import LaunchError
from fabric.core.messages import print_line
from fabric.launch.rank_exit import UNKNOWN_EXIT, RankExit, from_returncode, root_cause, summary
from fabric.launch.signals import DUPLICATE_SIGNAL_S, Handlers, unless_ignored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from fabric.launch.rank_logs import RankLogs

    Process = subprocess.Popen[bytes] | BaseProcess
    Start = Callable[[Connection, tuple[int, int] | None], Process]

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL for ranks that are stopped because another one failed."""
EXIT_NOTE_S = 10.0
"""Seconds after the first successful exit until the ranks that are still running are printed."""
KILL_GRACE_S = 10.0
"""Seconds after SIGKILL to wait for a process, which the kernel may block."""
ROOT_CAUSE_WAIT_S, ROOT_CAUSE_WAIT_MULTI_NODE_S = 10.0, 2.0
"""Seconds to wait for the root cause after a secondary failure. Less if it may be on another machine, whose
failures this supervisor never receives."""
_POLL_INTERVAL_S = 0.05
"""Seconds between polls of processes that have closed their pipe."""


class Supervisor:
    """The ranks of one machine, as child processes.

    Args:
        start_functions: By rank, the function that starts its process. Arguments: the pipe for the rank's
            `RankExit`, and the descriptors for its output (None: inherited).
        logs: Receives the ranks' output; None: they write to this process's stdout and stderr.
        multi_node: Whether the job has ranks on other machines.
        functions: Whether ranks run a function. They then report successful exits, too, and the caller prints
            tracebacks.
        parent_rank: The rank that started this process; None: all are started by this process.
    """

    def __init__(
        self,
        start_functions: Mapping[int, Start],
        logs: RankLogs | None = None,
        multi_node: bool = False,
        functions: bool = False,
        parent_rank: ParentRank | None = None,
    ) -> None:
        self.start_functions = start_functions
        self.multi_node = multi_node
        self.logs = logs
        self.processes: dict[int, Process | ParentRank] = {}
        self.exit_reports: dict[int, RankExit] = {}
        self.stopping = False
        self.signalled: int | None = None
        """The first forwarded signal that terminates processes."""
        self._signalled_at = float("-inf")
        self._functions = functions
        self._pipes: dict[int, Connection] = {}
        self._terminated: set[int] = set()
        self._joined: set[int] = set()
        """Ranks that have called `fabric.launch()`."""
        self._failures: dict[int, RankExit] = {}
        self._cause: RankExit | None = None
        self._parent_rank = parent_rank
        if parent_rank is not None:
            self.processes[parent_rank.rank], self._pipes[parent_rank.rank] = parent_rank, parent_rank.pipe
            self._joined.add(parent_rank.rank)

    def start(self) -> None:
        """Start all ranks.

        Raises:
            LaunchError: One cannot be started; those started before are stopped.
        """
        try:
            for rank, start in self.start_functions.items():
                self._pipes[rank], writer = Pipe(duplex=False)
                streams = None if self.logs is None else self.logs.streams(rank)
                try:
                    self.processes[rank] = start(writer, streams)
                finally:  # this process's copies; the rank's close at its exit
                    writer.close()
                    for descriptor in streams or ():
                        os.close(descriptor)
        except OSError as error:
            self.stop()
            raise LaunchError(f"Rank {rank} could not be started: {error}.") from error
        if self.logs is not None:
            self.logs.start()

    @contextlib.contextmanager
    def run(self, *numbers: int, on_signal: Callable[[int], object] | None = None) -> Iterator[Handlers]:
        """Context in which the ranks run and signals to this process are forwarded to them.

        Args:
            numbers: The signals; those that this process ignores are not handled.
            on_signal: Called with each signal's number in place of `forward`.

        Raises:
            LaunchError: See `start`.
        """

        def handle(number: int, previous: Any) -> bool:
            (on_signal or self.forward)(number)
            return not self._functions  # with functions, the process may have handlers of the user

        handlers = Handlers(unless_ignored(*numbers), handle)
        try:
            self.start()
            yield handlers
        finally:
            self.stop()
            self.close()
            handlers.restore()

    def running(self) -> list[int]:
        """Return the ranks whose process has not ended."""
        return [rank for rank, process in self.processes.items() if _code(process) is None]

    def wait(self, timeout: float | None = None, wake: Callable[[], bool] = lambda: False) -> RankExit | None:
        """Block until a rank has failed, all have ended, `stop` was called or `timeout` seconds are over.

        Args:
            timeout: Seconds; None: no limit.
            wake: Called after every signal and at least once per second; True ends the wait.

        Returns:
            The first failure; None: no rank has failed.
        """
        self._wait_until(lambda: self._failures or self.stopping or wake(), timeout)
        return None if wake() else self.first_failure()

    def wait_all(self, timeout: float) -> RankExit | None:
        """Block until all have ended or `timeout` seconds are over; failures do not end the wait."""
        self._wait_until(lambda: False, timeout)
        return self.first_failure()

    def wait_with_notice(self, notice: str) -> RankExit | None:
        """Call `wait`, and print the ranks that are still running after some time."""
        failure = self.wait(EXIT_NOTE_S)
        if failure is None and not self.stopping and (late := self.running()):
            print_line(notice.format(", ".join(map(str, late))))
            failure = self.wait()
        return failure

    def first_failure(self) -> RankExit | None:
        """Return the root cause of the failures so far; waits for it if all are secondary."""
        self._poll()
        if not self._failures:
            return None
        seconds, failures = (
            ROOT_CAUSE_WAIT_MULTI_NODE_S if self.multi_node else ROOT_CAUSE_WAIT_S,
            self._failures,
        )
        self._wait_until(
            lambda: self.stopping or not root_cause(failures.values()).is_secondary_failure, seconds
        )
        return root_cause(failures.values(), self.finished())

    def finished(self) -> list[int]:
        """Return the ranks that have exited successfully, or have reported that."""
        ended = [rank for rank, process in self.processes.items() if _code(process) == 0]
        return sorted({*ended, *self.exit_reports} - self._failures.keys())

    def summary(self, cause: RankExit) -> str:
        """Terminate all ranks but the one that failed; return the last line of the job."""
        self._cause = cause
        self.terminate()
        return summary(cause, self._terminated, self._failures.values(), self.multi_node)

    def stop_and_report(self, cause: RankExit) -> int:
        """Stop all ranks, print the cause as the last line, and return the exit code of the job."""
        line = self.summary(cause)
        self.stop()
        if self.logs is not None:
            self.logs.close()  # first the output of the ranks
        sys.stderr.write(cause.trace)  # not printed by the rank
        print_line(line)
        process = self.processes.get(cause.rank)
        code = None if process is None else _code(process)
        return code if code is not None and code > 0 else cause.code

    def stop(self) -> None:
        """Stop every rank: SIGTERM, a grace period, SIGKILL; Ctrl-C in that period sends SIGKILL at once.

        The rank that failed first gets no SIGTERM, so that it can finish printing its traceback.
        """
        self.terminate()
        try:
            self._wait_until(lambda: False, STOP_GRACE_S)
        finally:
            # The parent rank exits by itself, with the exit code of the job.
            started = [rank for rank in self.running() if self.processes[rank] is not self._parent_rank]
            self.send(signal.SIGKILL, started)
            self._wait_until(lambda: False, KILL_GRACE_S)  # longer only if the kernel blocks it (a dead disk)
            self.send(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM to every running rank but the one that failed first, without waiting."""
        self.stopping = True
        excluded = {*self._terminated} if self._cause is None else {*self._terminated, self._cause.rank}
        newly_terminated = [rank for rank in self.running() if rank not in excluded]
        self._terminated.update(newly_terminated)
        self.send(signal.SIGTERM, newly_terminated)

    def send(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to `ranks`, which default to all that are running."""
        for rank in self.running() if ranks is None else ranks:
            process, code = self.processes[rank], 1 if self._cause is None else self._cause.code
            if process is self._parent_rank:
                process.send(number, code if self.stopping else None)
            elif process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def forward(self, number: int) -> None:
        """Forward a signal of this process to the ranks. A second signal that terminates sends SIGKILL."""
        if number not in TERMINATION_SIGNALS:
            self.send(number)
            return
        previous, self._signalled_at = self._signalled_at, time.monotonic()
        if self.signalled is None:
            self.signalled = number
            self.send(number)
        elif self._signalled_at - previous > DUPLICATE_SIGNAL_S:  # else a duplicate of the first
            self.send(signal.SIGKILL)

    def close(self) -> None:
        """Copy the remaining output of the ranks, and close the pipes."""
        if self.logs is not None:
            self.logs.close()
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes.clear()

    def _poll(self) -> None:
        """Receive messages of ranks and record exits since the last call."""
        if self.stopping:
            return
        # Exit codes first: then all messages of ranks that have exited are in the pipes.
        now, codes = time.monotonic(), {rank: _code(process) for rank, process in self.processes.items()}
        for rank, pipe in list(self._pipes.items()):
            while rank in self._pipes and pipe.poll():
                self._receive(rank, pipe)
        for rank, code in codes.items():
            unreported = self._functions and code == 0 and rank not in self.exit_reports
            if (code or unreported) and rank not in self._failures:
                self._failures[rank] = from_returncode(rank, code or 0, now, self._functions)
            elif code == 0 and self._joined and rank not in self._joined:
                waits = f"finished (exit 0) before fabric.launch(), in which rank {min(self._joined)} waits"
                self._failures.setdefault(rank, RankExit(now, waits, rank=rank))

    def _receive(self, rank: int, pipe: Connection) -> None:
        """Receive a message of a rank: it has joined the job, its `RankExit`, or the end of its pipe."""
        with contextlib.suppress(EOFError, OSError):
            message = pickle.loads(pipe.recv_bytes())
            if message is None:
                self._joined.add(rank)
                return
            self.exit_reports[rank] = report = RankExit(*message)._replace(rank=rank)
            trace = "" if self._functions else report.trace
            if self.logs is not None:
                self.logs.write_error(rank, trace)
            if report.reason is not None:
                self._failures[rank] = report._replace(trace=trace)
        del self._pipes[rank]
        pipe.close()

    def _wait_until(self, over: Callable[[], object], timeout: float | None) -> None:
        """Block until `over()` is true, all ranks have ended, or `timeout` seconds have passed."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        self._poll()
        while not over() and (running := self.running()) and time.monotonic() < deadline:
            self._wait_for_report(min(1.0, max(0.0, deadline - time.monotonic())), running)
            self._poll()

    def _wait_for_report(self, seconds: float, running: list[int]) -> None:
        """Block until a rank sends a message, or for `seconds`; may return early."""
        watched = {} if self.stopping else self._pipes
        pipes = [watched[rank] for rank in running if rank in watched]
        if pipes and self._parent_rank is not None and self._parent_rank.rank in running:
            pipes.append(self._parent_rank.control)
            running = [*running, -1]
        # The exit of a process closes its pipe. Processes whose pipe is closed already are polled.
        wait(pipes, seconds if len(pipes) == len(running) else min(seconds, _POLL_INTERVAL_S))


class ParentRank:
    """Rank zero, which started the supervisor; has the interface of a process that a supervisor started.

    Args:
        rank: Its number.
        pipe: Receives its `RankExit`.
        control: See `rank_zero.SupervisorLink`.
        signals: Descriptor from which the numbers of its signals are read.
    """

    def __init__(self, rank: int, pipe: Connection, control: Connection, signals: int) -> None:
        self.rank, self.pid, self.pipe = rank, os.getppid(), pipe
        self.control, self._signals = control, signals
        self._code: int | None = None
        self._lock = threading.Lock()

    @property
    def exitcode(self) -> int | None:
        """0 after its exit, `UNKNOWN_EXIT` if it was killed; None while it runs."""
        with self._lock:
            if self._code is None:
                try:
                    self._code = 0 if self.control.poll() and self.control.recv() is None else None
                except (EOFError, OSError):
                    self._code = UNKNOWN_EXIT
            if self._code is None and os.getppid() != self.pid:
                self._code = UNKNOWN_EXIT
            return self._code

    def send(self, number: int, code: int | None) -> None:
        """Send a signal.

        Args:
            number: SIGKILL or SIGSTOP; the rank has received others itself.
            code: With SIGTERM: the exit code that it must use; None: it chooses.
        """
        with contextlib.suppress(OSError):
            if number == signal.SIGTERM and code is not None:
                self.control.send(("end", code))
            elif number in (signal.SIGKILL, signal.SIGSTOP):
                os.kill(self.pid, number)

    def forward_signals(self, supervisor: Any) -> None:
        """Forward, in a thread, the signals that rank zero receives."""
        threading.Thread(target=self._forward_signals, args=(supervisor,), daemon=True).start()

    def _forward_signals(self, supervisor: Any) -> None:
        while numbers := os.read(self._signals, 64):
            for number in numbers:
                if number == signal.SIGTSTP:
                    supervisor.send(signal.SIGSTOP)
                elif number == signal.SIGCONT:
                    supervisor.send(signal.SIGCONT)
                elif number in FORWARDED_SIGNALS:
                    supervisor.forward(number)


def _code(process: Process | ParentRank) -> int | None:
    """Return the exit code; None while the process runs."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
