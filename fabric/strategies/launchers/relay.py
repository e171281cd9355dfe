"""`Relay`: what SIGTERM and Ctrl-C to a rank mean for the ranks that it has started. Imports no torch."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from fabric.processes.signals import TOGETHER_S, Handlers, Listener, die_by
from fabric.strategies.launchers.supervisor import STOP_GRACE_S

if TYPE_CHECKING:
    from fabric.strategies.launchers.supervisor import Supervisor

AGAIN_S = 5.0
"""A second Ctrl-C within so many seconds ends all ranks at once."""


class Relay:
    """Passes SIGTERM on to the ranks, once; a second one, or a second Ctrl-C, ends them and this process.

    Works while the main thread is deep in a collective. Handlers that others have installed, or will, are
    called as before; without any, this process ends as SIGTERM ends it, once the ranks have.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._ending = threading.Event()
        self._last: dict[int, float] = {}
        self._listener = Listener(self._take)
        mine = [] if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN else [signal.SIGTERM]
        self._handlers = Handlers(mine, self._in_main_thread)

    def await_end(self) -> None:
        """Does not come back if this process ends by SIGTERM: its ranks end first, and it may notice."""
        if self._ending.is_set():
            time.sleep(2 * STOP_GRACE_S)

    def _in_main_thread(self, number: int, _: Any) -> None:
        self._listener.heard(number)

    def _take(self, number: int) -> None:
        now, last = time.monotonic(), self._last.get(number, float("-inf"))
        if now - last < TOGETHER_S:
            return
        self._last[number] = now
        if number == signal.SIGTERM:
            self._on_sigterm(first=last == float("-inf"))
        elif number == signal.SIGINT and now - last < AGAIN_S and _interrupts():
            self._end_at_once(number)

    def _on_sigterm(self, first: bool) -> None:
        if not first:
            self._end_at_once(signal.SIGTERM)
        elif self._others_handle_it():
            self._supervisor.send(signal.SIGTERM)
        else:
            self._ending.set()
            self._supervisor.stop()
            die_by(signal.SIGTERM)

    def _others_handle_it(self) -> bool:
        number = signal.SIGTERM
        return callable(self._handlers.before(number)) or not self._handlers.in_place(number)

    def _end_at_once(self, number: int) -> None:
        self._supervisor.stopping = True
        self._supervisor.send(signal.SIGKILL)
        die_by(number)


def _interrupts() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
