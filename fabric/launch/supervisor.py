"""Starts ranks, watches them, ends them all when one fails. Imports no torch."""

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
from fabric.launch.rank_exit import LOST, RankExit, from_returncode, root_cause, summary
from fabric.launch.signals import TOGETHER_S, Handlers, unless_ignored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from fabric.launch.rank_logs import RankLogs

    Process = subprocess.Popen[bytes] | BaseProcess
    Start = Callable[[Connection, tuple[int, int] | None], Process]

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL for ranks that are stopped because another one failed."""
EXIT_NOTE_S = 10.0
"""Seconds after the normal end of one rank until it is said which others are still waited for."""
KILL_GRACE_S = 10.0
"""Seconds after SIGKILL in which a process has ended, unless the kernel holds it."""
SETTLE_S, SETTLE_ELSEWHERE_S = 10.0, 2.0
"""Seconds in which a cause is looked for behind what reads like its consequence: less if it may be on another
machine, where nothing will ever be seen of it."""
_POLL_S = 0.05
"""Seconds between two looks for the end of processes that will say no more."""


class Supervisor:
    """The ranks of one machine, as child processes.

    Args:
        starts: By rank, what starts its process: it is given a link, by which the rank may say a `RankExit`,
            and the descriptors to which it is to print, if there are logs.
        logs: Takes what the ranks print; None: it goes where this process prints.
        elsewhere: Whether the job has ranks on other machines.
        functions: Whether each rank says its ending, also a good one, and leaves its traceback to the caller.
        creator: The rank that started this process; None: all are started here.
    """

    def __init__(
        self,
        starts: Mapping[int, Start],
        logs: RankLogs | None = None,
        elsewhere: bool = False,
        functions: bool = False,
        creator: Creator | None = None,
    ) -> None:
        self.starts = starts
        self.elsewhere = elsewhere
        self.logs = logs
        self.processes: dict[int, Process | Creator] = {}
        self.endings: dict[int, RankExit] = {}
        self.stopping = False
        self.signalled: int | None = None
        """The first signal passed on that ends a process."""
        self._signalled_at = float("-inf")
        self._functions = functions
        self._links: dict[int, Connection] = {}
        self._told: set[int] = set()
        self._joined: set[int] = set()
        """Command lines that are in `fabric.launch()`, or were."""
        self._failures: dict[int, RankExit] = {}
        self._cause: RankExit | None = None
        self._creator = creator
        if creator is not None:
            self.processes[creator.rank], self._links[creator.rank] = creator, creator.link
            self._joined.add(creator.rank)

    def start(self) -> None:
        """Start all ranks.

        Raises:
            LaunchError: One cannot be started; those started before are stopped again.
        """
        try:
            for rank, start in self.starts.items():
                self._links[rank], writer = Pipe(duplex=False)
                streams = None if self.logs is None else self.logs.streams(rank)
                try:
                    self.processes[rank] = start(writer, streams)
                finally:  # ours; the rank's own end as it ends
                    writer.close()
                    for descriptor in streams or ():
                        os.close(descriptor)
        except OSError as error:
            self.stop()
            raise LaunchError(f"Rank {rank} could not be started: {error}.") from error
        if self.logs is not None:
            self.logs.start()

    @contextlib.contextmanager
    def run(self, *numbers: int, act: Callable[[int], object] | None = None) -> Iterator[Handlers]:
        """Within, the ranks run. In place of what they did, these signals of this process are passed on.

        Args:
            numbers: The signals; those that this process ignores are left alone.
            act: Called with each signal's number in place of `pass_on`.

        Raises:
            LaunchError: As by `start`.
        """

        def handle(number: int, before: Any) -> bool:
            (act or self.pass_on)(number)
            return not self._functions  # whose launching process is the user's

        handlers = Handlers(unless_ignored(*numbers), handle)
        try:
            self.start()
            yield handlers
        finally:
            self.stop()
            self.close()
            handlers.restore()

    def running(self) -> list[int]:
        """Ranks whose process has not ended."""
        return [rank for rank, process in self.processes.items() if _code(process) is None]

    def wait(self, timeout: float | None = None, wake: Callable[[], bool] = lambda: False) -> RankExit | None:
        """Block until a rank has failed, all have ended, `stop` was called or `timeout` seconds are over.

        Args:
            timeout: Seconds; None: no limit.
            wake: Asked after every signal and at least once per second; True ends the waiting.

        Returns:
            The failure that came first; None while nothing failed.
        """
        self._until(lambda: self._failures or self.stopping or wake(), timeout)
        return None if wake() else self.first_failure()

    def wait_all(self, timeout: float) -> RankExit | None:
        """Block until all have ended or `timeout` seconds are over; failures do not end the waiting."""
        self._until(lambda: False, timeout)
        return self.first_failure()

    def wait_noting(self, what: str) -> RankExit | None:
        """Call `wait`, and print the ranks that are still running after some time."""
        failure = self.wait(EXIT_NOTE_S)
        if failure is None and not self.stopping and (late := self.running()):
            print_line(what.format(", ".join(map(str, late))))
            failure = self.wait()
        return failure

    def first_failure(self) -> RankExit | None:
        """The cause among the failures so far; looks a moment longer where only consequences are in sight."""
        self._look()
        if not self._failures:
            return None
        seconds, failures = SETTLE_ELSEWHERE_S if self.elsewhere else SETTLE_S, self._failures
        self._until(lambda: self.stopping or not root_cause(failures.values()).is_secondary_failure, seconds)
        return root_cause(failures.values(), self.finished())

    def finished(self) -> list[int]:
        """The ranks that have ended well, or have said so."""
        ended = [rank for rank, process in self.processes.items() if _code(process) == 0]
        return sorted({*ended, *self.endings} - self._failures.keys())

    def summary(self, cause: RankExit) -> str:
        """Tell all others than the one that failed to end; the last line of the job."""
        self._cause = cause
        self.tell()
        return summary(cause, self._told, self._failures.values(), self.elsewhere)

    def conclude(self, cause: RankExit) -> int:
        """Stop all ranks and print the cause, last; gives the exit code of the job."""
        line = self.summary(cause)
        self.stop()
        if self.logs is not None:
            self.logs.close()  # what the ranks have printed comes before
        sys.stderr.write(cause.trace)  # what the rank has not printed itself
        print_line(line)
        process = self.processes.get(cause.rank)
        code = None if process is None else _code(process)
        return code if code is not None and code > 0 else cause.code

    def stop(self) -> None:
        """End every rank: SIGTERM, a grace, SIGKILL; the last at once if Ctrl-C comes meanwhile.

        The cause of a failure gets the grace to finish its traceback.
        """
        self.tell()
        try:
            self._until(lambda: False, STOP_GRACE_S)
        finally:
            # The creator ends itself, with the cause's code.
            started = [rank for rank in self.running() if self.processes[rank] is not self._creator]
            self.send(signal.SIGKILL, started)
            self._until(lambda: False, KILL_GRACE_S)  # else in the kernel's hands (a dead disk)
            self.send(signal.SIGKILL)

    def tell(self) -> None:
        """The first half of `stop`: SIGTERM to every rank that runs, but the cause, without waiting."""
        self.stopping = True
        spared = {*self._told} if self._cause is None else {*self._told, self._cause.rank}
        fresh = [rank for rank in self.running() if rank not in spared]
        self._told.update(fresh)
        self.send(signal.SIGTERM, fresh)

    def send(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to the ranks that still run (all, or those named)."""
        for rank in self.running() if ranks is None else ranks:
            process, code = self.processes[rank], 1 if self._cause is None else self._cause.code
            if process is self._creator:
                process.send(number, code if self.stopping else None)
            elif process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def pass_on(self, number: int) -> None:
        """Send a signal that came to this process; what ends processes once, and the next time SIGKILL."""
        if number not in ENDS:
            self.send(number)
            return
        before, self._signalled_at = self._signalled_at, time.monotonic()
        if self.signalled is None:
            self.signalled = number
            self.send(number)
        elif self._signalled_at - before > TOGETHER_S:  # else one request, which came twice
            self.send(signal.SIGKILL)

    def close(self) -> None:
        """Give the pipes back, after what came through them has been taken."""
        if self.logs is not None:
            self.logs.close()
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _look(self) -> None:
        """Take note of what has ended since."""
        if self.stopping:
            return
        # First who has ended: what they said before then is in the pipes.
        now, codes = time.monotonic(), {rank: _code(process) for rank, process in self.processes.items()}
        for rank, link in list(self._links.items()):
            while rank in self._links and link.poll():
                self._hear(rank, link)
        for rank, code in codes.items():
            silent = self._functions and code == 0 and rank not in self.endings
            if (code or silent) and rank not in self._failures:
                self._failures[rank] = from_returncode(rank, code or 0, now)
            elif code == 0 and self._joined and rank not in self._joined:
                waits = f"finished (exit 0) before fabric.launch(), in which rank {min(self._joined)} waits"
                self._failures.setdefault(rank, RankExit(now, waits, rank=rank))

    def _hear(self, rank: int, link: Connection) -> None:
        """Take that a rank has joined the job, what it says at its end, or the end of its link."""
        with contextlib.suppress(EOFError, OSError):
            said = pickle.loads(link.recv_bytes())
            if said is None:
                self._joined.add(rank)
                return
            self.endings[rank] = ending = RankExit(*said)._replace(rank=rank)
            trace = "" if self._functions else ending.trace
            if self.logs is not None:
                self.logs.note(rank, trace)
            if ending.reason is not None:
                self._failures[rank] = ending._replace(trace=trace)
        del self._links[rank]
        link.close()

    def _until(self, over: Callable[[], object], timeout: float | None) -> None:
        """Block until `over()`, all ranks have ended, or so many seconds have passed."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        self._look()
        while not over() and (running := self.running()) and time.monotonic() < deadline:
            self._sleep(min(1.0, max(0.0, deadline - time.monotonic())), running)
            self._look()

    def _sleep(self, seconds: float, running: list[int]) -> None:
        """Block until a rank says something that will be noted, or so long; may return early."""
        known = {} if self.stopping else self._links
        links = [known[rank] for rank in running if rank in known]
        if links and self._creator is not None and self._creator.rank in running:
            links.append(self._creator.control)
            running = [*running, -1]
        # The end of a process closes its link; who has said its end, or is not heard, may end at any moment.
        wait(links, seconds if len(links) == len(running) else min(seconds, _POLL_S))


class Creator:
    """Rank zero, as a process of the supervisor.

    Args:
        rank: Its number.
        link: Where it writes a `RankExit`.
        control: See `rank_zero.Tie`.
        signals: Where it writes numbers of signals.
    """

    def __init__(self, rank: int, link: Connection, control: Connection, signals: int) -> None:
        self.rank, self.pid, self.link = rank, os.getppid(), link
        self.control, self._signals = control, signals
        self._code: int | None = None
        self._lock = threading.Lock()

    @property
    def exitcode(self) -> int | None:
        """0 at its end; None while it runs."""
        with self._lock:
            if self._code is None:
                try:
                    self._code = 0 if self.control.poll() and self.control.recv() is None else None
                except (EOFError, OSError):
                    self._code = LOST
            if self._code is None and os.getppid() != self.pid:
                self._code = LOST
            return self._code

    def send(self, number: int, code: int | None) -> None:
        """Send a signal.

        Args:
            number: SIGKILL or SIGSTOP; others were passed on by this process itself.
            code: With SIGTERM: the exit code with which it is to end; None: it decides.
        """
        with contextlib.suppress(OSError):
            if number == signal.SIGTERM and code is not None:
                self.control.send(("end", code))
            elif number in (signal.SIGKILL, signal.SIGSTOP):
                os.kill(self.pid, number)

    def pass_signals(self, supervisor: Any) -> None:
        """Pass on, in a thread, the signals that rank zero receives."""
        threading.Thread(target=self._pass, args=(supervisor,), daemon=True).start()

    def _pass(self, supervisor: Any) -> None:
        while numbers := os.read(self._signals, 64):
            for number in numbers:
                if number == signal.SIGTSTP:
                    supervisor.send(signal.SIGSTOP)
                elif number == signal.SIGCONT:
                    supervisor.send(signal.SIGCONT)
                elif number in PASSED_ON:
                    supervisor.pass_on(number)


def _code(process: Process | Creator) -> int | None:
    """The exit code; None while it runs."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
