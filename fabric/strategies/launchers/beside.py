"""The supervisor of a script's ranks. Rank zero has started it (`rank_zero.py`). Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from fabric.strategies.launchers.commands import run_commands
from fabric.strategies.launchers.failure import LOST

if TYPE_CHECKING:
    from fabric.strategies.launchers.supervisor import Supervisor

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Creator:
    """Rank zero, as a process of the supervisor.

    Args:
        link: Where it writes an `Ending`.
        control: See `rank_zero.Tie`.
        signals: Where it writes numbers of signals.
    """

    def __init__(self, link: Connection, control: Connection, signals: int) -> None:
        self.pid, self.link, self.control, self._signals = os.getppid(), link, control, signals
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

    def pass_signals(self, supervisor: Supervisor) -> None:
        """Pass on, in a thread, the signals that rank zero receives."""
        threading.Thread(target=self._pass, args=(supervisor,), daemon=True).start()

    def _pass(self, supervisor: Supervisor) -> None:
        while numbers := os.read(self._signals, 64):
            for number in numbers:
                if number == signal.SIGTSTP:
                    supervisor.send(signal.SIGSTOP)
                elif number == signal.SIGCONT:
                    supervisor.send(signal.SIGCONT)
                elif number in _PASSED_ON:
                    supervisor.pass_on(number)


def main(link: int, control: int, signals: int) -> None:
    """Start and watch the ranks that rank zero asks for, and send it the exit code of the job."""
    for number in _PASSED_ON:  # a scheduler may send them to all processes; ranks decide
        signal.signal(number, lambda *_: None)
    connection = Connection(control)
    creator = Creator(Connection(link, writable=False), connection, signals)
    argv, cwd, first = connection.recv()
    code = run_commands(argv, first, None, {}, "script", cwd, creator=creator)
    with contextlib.suppress(OSError):
        connection.send(("over", code))
