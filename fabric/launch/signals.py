"""Signal handlers that chain to previous ones and are removed in forked children. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

DUPLICATE_SIGNAL_S = 0.5
"""Equal signals within so many seconds count as one: a scheduler signals all processes, and launchers forward
signals."""


def die_by(number: int) -> None:
    """End this process at once by the default action of the signal, from any thread."""
    flush_output()
    ctypes.CDLL(None).signal(number, 0)  # signal.signal works in the main thread only
    os.kill(os.getpid(), number)
    time.sleep(1.0)
    os._exit(128 + number)  # only if the signal is blocked


def flush_output() -> None:
    """Flush stdout and stderr; errors are ignored."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, closed, or without a reader
            stream.flush()


def unless_ignored(*numbers: int) -> list[int]:
    """Return the signals that this process does not ignore (under nohup, it ignores SIGHUP)."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


class Handlers:
    """Handlers for signals of this process; in a forked child the previous handlers are restored.

    A child with a Python handler would not be ended by a signal while it runs native code.

    Handlers can be set in the main thread only; in another one, this does nothing.

    Args:
        numbers: The signals.
        on_signal: Called with the signal's number and the previous handler (a callable, SIG_DFL or SIG_IGN).
            A callable previous handler is called afterwards, unless this returns True.
    """

    def __init__(self, numbers: Iterable[int], on_signal: Callable[[int, Any], object]) -> None:
        self._on_signal, self._owner = on_signal, os.getpid()
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in set(numbers):
                previous = signal.signal(number, self._handle)
                # None: a handler that was not set by Python.
                self._previous[number] = signal.SIG_DFL if previous is None else previous
            _restore_on_fork(self)

    def previous(self, number: int) -> Any:
        """Return the previous handler of a signal."""
        return self._previous.get(number, signal.SIG_DFL)

    def numbers(self) -> Iterable[int]:
        """Return the signals that are handled."""
        return self._previous.keys()

    def restore(self) -> None:
        """Restore the previous handlers, except where another handler was set since."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self.previous(number)
        if os.getpid() != self._owner:  # in a forked child, called by another handler that chains to this one
            signal.signal(number, previous)
            os.kill(os.getpid(), number)
            return
        if self._on_signal(number, previous) is not True and callable(previous):
            previous(number, frame)


_instances: list[weakref.ref[Handlers]] = []
_masks = threading.local()


def _restore_on_fork(handlers: Handlers) -> None:
    """Remove the handlers in children that this process forks; a signal during the fork is not lost."""
    if not _instances:
        os.register_at_fork(
            before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_in_child
        )
    _instances.append(weakref.ref(handlers))


def _live_instances() -> list[Handlers]:
    return [handlers for reference in _instances if (handlers := reference()) is not None]


def _block_signals() -> None:
    # Python discards in the child the signals that arrived since the fork.
    numbers = {number for handlers in _live_instances() for number in handlers.numbers()}
    _masks.previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.previous_mask)


def _restore_in_child() -> None:
    for handlers in reversed(_live_instances()):
        handlers.restore()
    _unblock_signals()
