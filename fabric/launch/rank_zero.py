"""Rank zero of `python train.py`: the process that the user started.

A supervisor starts and watches the other ranks (`beside.py`). Imports no torch.
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
from fabric.launch.parent_death import NotedExit, report_exceptions, report_exits, send_exit
from fabric.launch.signals import die_by, flush_output
from fabric.launch.stores import keep_listening

if TYPE_CHECKING:
    import socket

    from fabric.launch.rank_env import RankEnv

_ROOT = Path(__file__).parents[2]
_BESIDE = (
    "import sys; sys.path.append(sys.argv[1]); from fabric.launch.commands import watch_beside; "
    "watch_beside(*map(int, sys.argv[2:]))"
)
_END_S = 2.5
"""Seconds for `finally` once another rank has failed; then the supervisor would send SIGKILL."""
_NOTE_S = 10.0
"""Seconds at the end of this rank until it prints that it waits for the others."""


def start_others(argv: list[str], cwd: str | None, first: RankEnv, listener: socket.socket | None) -> None:
    """Start the other ranks of this machine, and make this process the first of them.

    Args:
        argv: The command line of the others.
        cwd: Where they start; None: here.
        first: The place of this process.
        listener: For the store, on the first machine.
    """
    report, ours = Pipe(duplex=False)
    control, theirs = Pipe()
    signals, writer = os.pipe()
    os.set_blocking(writer, False)  # its reader stays open: a signal may arrive after the supervisor
    handed = [report.fileno(), theirs.fileno(), signals]
    command = [sys.executable, "-I", "-S", "-c", _BESIDE, str(_ROOT), *map(str, handed)]
    with report, theirs:
        # A session of its own: the terminal's Ctrl-C reaches this process, which passes it on.
        beside = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=handed, start_new_session=True, close_fds=True
        )
    beside.returncode = 0  # it ends after this process, or just before
    control.send((argv, cwd, first))
    os.environ.update(first.variables(os.environ, "script"))
    if listener is not None:
        keep_listening(listener, first.main_address, first.main_port)
    tie = Tie(beside.pid, control, writer)
    report_exceptions(ours)
    report_exits(lambda status: tie.note(send_exit(ours, status)))


class Tie:
    """Passes this process's signals to the supervisor, ends this process when another rank fails, and waits
    at its end for the other ranks.

    Args:
        beside: The process id of the supervisor.
        control: To it: None at the end of this rank. From it: ("end", code) when a rank has failed, and
            ("over", code) when all others have ended, with the exit code of the job.
        signals: The number of each signal is written to this descriptor, also while native code runs.
    """

    def __init__(self, beside: int, control: Connection, signals: int) -> None:
        self._beside, self._control, self.owner = beside, control, os.getpid()
        self.own: int | None = None
        """The code with which Python ends this process, as far as it is known."""
        self._code: int | None = None
        """What to end with, since another rank has failed."""
        self._verdict: int | None = None
        self._decided, self._ending = threading.Event(), False
        if threading.current_thread() is threading.main_thread():
            known = signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
            if known != -1:  # of a running event loop, which needs it
                signal.set_wakeup_fd(known)
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
            for number in (signal.SIGTSTP, signal.SIGCONT):  # without a handler, nothing is written
                if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
                    signal.signal(number, self._handle)
        threading.Thread(target=self._listen, daemon=True, name="fabric-supervisor").start()
        atexit.register(self._at_exit)

    def _handle(self, number: int, _: Any) -> None:
        # Python ignores it once it has begun to end; the exit code is changed by force then.
        is_running = not (self._ending or getattr(threading, "_SHUTTING_DOWN", False))
        if number == signal.SIGCONT and self._code is not None and is_running:
            raise NotedExit(self._code, self.note)

    def note(self, code: int) -> None:
        """Take the code with which Python ends this process."""
        self.own = code

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            what, code = self._control.recv()
            if what == "end":
                self._end(code)
                code = self._control.recv()[1]
            self._verdict = code
        if self._verdict is None:
            print_line(
                f"the supervisor of this job (process {self._beside}) was killed, the other ranks with it"
            )
            self._verdict = 1
            self._end(1)
        self._decided.set()

    def _end(self, code: int) -> None:
        """End this process by SystemExit in its main thread; by force where that takes too long."""
        if self._ending:
            return
        self._code = code
        threading.Thread(target=self._end_by_force, daemon=True, name="fabric-end").start()
        with contextlib.suppress(OSError, RuntimeError):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCONT)  # calls `_handle`

    def _end_by_force(self) -> None:
        time.sleep(_END_S)
        if not self._ending:
            self._leave()
            self._decided.wait(_NOTE_S)
            flush_output()
            os._exit(self._verdict or self._code or 1)

    def _leave(self) -> None:
        self._ending = True
        flush_output()
        with contextlib.suppress(OSError):
            self._control.send(None)

    def _at_exit(self) -> None:
        """Wait for the other ranks. The exit code is that of the rank that failed first."""
        if os.getpid() != self.owner:
            return
        self._leave()
        timeout: float | None = _NOTE_S
        while not self._decided.is_set():
            with contextlib.suppress(KeyboardInterrupt):  # the others have it, too
                if not self._decided.wait(timeout) and timeout is not None:
                    print_line("this rank has reached its end, and waits for the other ranks of this machine")
                    timeout = None
        flush_output()
        if self._verdict == 128 + signal.SIGINT:
            die_by(signal.SIGINT)
        raised = 1 if getattr(sys, "last_value", None) is not None else None
        if self._verdict not in (0, raised, self.own):
            os._exit(self._verdict or 1)
