"""Rank zero of `python train.py`: the process that the user started.

It starts a supervisor process, which starts and watches the other ranks (`commands.py`). Imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.messages import print_line
from fabric.launch.parent_death import ReportedExit, report_exceptions, report_exits, send_exit
from fabric.launch.signals import die_by, flush_output
from fabric.launch.stores import register_listener

if TYPE_CHECKING:
    import socket

    from fabric.launch.rank_env import RankEnv

_ROOT = Path(__file__).parents[2]
_SUPERVISOR_SCRIPT = (
    "import sys; sys.path.append(sys.argv[1]); from fabric.launch.commands import supervise_other_ranks; "
    "supervise_other_ranks(*map(int, sys.argv[2:]))"
)
_EXIT_GRACE_S = 2.5
"""Seconds for `finally` blocks once another rank has failed; less than the supervisor's SIGKILL timeout."""
_EXIT_NOTICE_S = 10.0
"""Seconds after which this rank, at its exit, prints that it waits for the others."""


def start_other_ranks(
    argv: list[str], cwd: str | None, first: RankEnv, listener: socket.socket | None
) -> None:
    """Start the other ranks of this machine, and make this process the first rank.

    Args:
        argv: The command line of the other ranks.
        cwd: Their working directory; None: that of this process.
        first: The environment of this process.
        listener: The listening socket of the store, on the first machine.
    """
    report, rank_end = Pipe(duplex=False)
    control, supervisor_end = Pipe()
    signals, writer = os.pipe()
    os.set_blocking(writer, False)  # a signal may arrive after the supervisor's exit
    descriptors = [report.fileno(), supervisor_end.fileno(), signals]
    command = [sys.executable, "-I", "-S", "-c", _SUPERVISOR_SCRIPT, str(_ROOT), *map(str, descriptors)]
    with report, supervisor_end:
        # In a new session, so that the terminal's Ctrl-C reaches only this process, which forwards it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True, close_fds=True
        )
    process.returncode = 0  # never waited for: it ends after this process, or just before
    control.send((argv, cwd, first))
    os.environ.update(first.variables(os.environ, "script"))
    if listener is not None:
        register_listener(listener, first.main_address, first.main_port)
    link = SupervisorLink(process.pid, control, writer)
    report_exceptions(rank_end)
    report_exits(lambda error, status: link.set_exit_code(_exit_code(rank_end, error, status)))


def _exit_code(rank_end: Connection, error: ReportedExit, status: Any) -> int:
    """Return the exit code of this process, and send its own failure to the supervisor."""
    return int(status) if error.is_secondary else send_exit(rank_end, status)


class SupervisorLink:
    """Forwards this process's signals to the supervisor, and ends this process when another rank fails.

    At its exit, this process waits for the other ranks.

    Args:
        supervisor_pid: The process id of the supervisor.
        control: Sends None at the exit of this rank. Receives ("end", code) when a rank has failed, and
            ("over", code) when all others have exited, with the exit code of the job.
        signals: Descriptor to which the number of each signal is written, even while native code runs.
    """

    def __init__(self, supervisor_pid: int, control: Connection, signals: int) -> None:
        self._supervisor_pid, self._control, self.owner = supervisor_pid, control, os.getpid()
        self.exit_code: int | None = None
        """The exit code of this process according to `sys.exit`; None: not called."""
        self._failure_code: int | None = None
        """The exit code after the failure of another rank; None: none has failed."""
        self._job_code: int | None = None
        self._job_ended, self._is_ending = threading.Event(), False
        if threading.current_thread() is threading.main_thread():
            previous_fd = signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
            if previous_fd != -1:  # that of a running event loop, which needs it
                signal.set_wakeup_fd(previous_fd)
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
            for number in (signal.SIGTSTP, signal.SIGCONT):  # numbers are written only if there is a handler
                if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
                    signal.signal(number, self._on_sigcont)
        threading.Thread(target=self._receive, daemon=True, name="fabric-supervisor").start()
        atexit.register(self._at_exit)

    def _on_sigcont(self, number: int, _: Any) -> None:
        # During shutdown Python ignores exceptions of handlers; `_at_exit` sets the exit code then.
        is_running = not (self._is_ending or getattr(threading, "_SHUTTING_DOWN", False))
        if number == signal.SIGCONT and self._failure_code is not None and is_running:
            raise ReportedExit(self._failure_code, is_secondary=True)

    def set_exit_code(self, code: int) -> None:
        """Record the exit code of this process."""
        self.exit_code = code

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            kind, code = self._control.recv()
            if kind == "end":
                self._exit_main_thread(code)
                code = self._control.recv()[1]
            self._job_code = code
        if self._job_code is None:
            print_line(
                f"the supervisor of this job (process {self._supervisor_pid}) was killed, and so were the "
                "other ranks"
            )
            self._job_code = 1
            self._exit_main_thread(1)
        self._job_ended.set()

    def _exit_main_thread(self, code: int) -> None:
        """End this process by SystemExit in its main thread, or by `os._exit` if that takes too long."""
        if self._is_ending:
            return
        self._failure_code = code
        threading.Thread(target=self._force_exit, daemon=True, name="fabric-end").start()
        with contextlib.suppress(OSError, RuntimeError):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCONT)  # calls `_on_sigcont`

    def _force_exit(self) -> None:
        time.sleep(_EXIT_GRACE_S)
        if not self._is_ending:
            self._announce_exit()
            self._job_ended.wait(_EXIT_NOTICE_S)
            flush_output()
            os._exit(self._job_code or self._failure_code or 1)

    def _announce_exit(self) -> None:
        self._is_ending = True
        flush_output()
        with contextlib.suppress(OSError):
            self._control.send(None)

    def _at_exit(self) -> None:
        """Wait for the other ranks, then exit with the code of the rank that failed first."""
        if os.getpid() != self.owner:
            return
        self._announce_exit()
        timeout: float | None = _EXIT_NOTICE_S
        while not self._job_ended.is_set():
            with contextlib.suppress(KeyboardInterrupt):  # forwarded to the other ranks, too
                if not self._job_ended.wait(timeout) and timeout is not None:
                    print_line("this rank has finished, and waits for the other ranks of this machine")
                    timeout = None
        flush_output()
        if self._job_code == 128 + signal.SIGINT:
            die_by(signal.SIGINT)
        raised = 1 if getattr(sys, "last_value", None) is not None else None
        if self._job_code not in (0, raised, self.exit_code):
            os._exit(self._job_code or 1)
