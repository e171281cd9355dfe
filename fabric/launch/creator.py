"""`Creator`: rank zero of a script, as a process of the supervisor that it has started. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from fabric.launch.failure import LOST

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
