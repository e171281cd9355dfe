"""Handlers of signals that give way to others, and ends by a signal. Imports no torch."""

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

TOGETHER_S = 0.5
"""Signals of a kind within so many seconds are one: a scheduler tells all processes, and a launcher passes it
on."""


def die_by(number: int) -> None:
    """End this process at once as the signal does by default, from any thread."""
    flush_output()
    ctypes.CDLL(None).signal(number, 0)  # Python's way works in the main thread only
    os.kill(os.getpid(), number)
    time.sleep(1.0)
    os._exit(128 + number)  # only if the signal is blocked


def flush_output() -> None:
    """Pass on what stdout and stderr of this process still hold."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # none, gone, or closed
            stream.flush()


def unless_ignored(*numbers: int) -> list[int]:
    """Return those of the signals that this process does not ignore, as it does SIGHUP under nohup."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


class Handlers:
    """Handlers for some signals of this process; in a forked child what stood there before is back.

    A child with a handler of Python's would not end by a signal while it is deep in native code.

    Signals can only be taken in the main thread; made in another one, this does nothing.

    Args:
        numbers: The signals.
        act: Called with the signal's number and what stood here before (a callable, SIG_DFL or SIG_IGN). A
            callable is called afterwards, unless this returns True.
    """

    def __init__(self, numbers: Iterable[int], act: Callable[[int, Any], object]) -> None:
        self._act, self._owner = act, os.getpid()
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in set(numbers):
                before = signal.signal(number, self._handle)
                self._before[number] = signal.SIG_DFL if before is None else before  # None: not Python's
            _guard(self)

    def before(self, number: int) -> Any:
        """Return the previous handler of a signal."""
        return self._before.get(number, signal.SIG_DFL)

    def numbers(self) -> Iterable[int]:
        """The signals it has taken."""
        return self._before.keys()

    def restore(self) -> None:
        """Put back what stood here before, except where somebody has put another handler in our place."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self.before(number)
        if os.getpid() != self._owner:  # a fork has copied it, and another handler that calls this one
            signal.signal(number, before)
            os.kill(os.getpid(), number)
            return
        if self._act(number, before) is not True and callable(before):
            before(number, frame)


_known: list[weakref.ref[Handlers]] = []
_masks = threading.local()


def _guard(handlers: Handlers) -> None:
    """Take them away in children that this process forks; a signal in that moment is not lost."""
    if not _known:
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_give_way)
    _known.append(weakref.ref(handlers))


def _alive() -> list[Handlers]:
    return [handlers for known in _known if (handlers := known()) is not None]


def _hold() -> None:
    # Python forgets in the child what has arrived since the fork.
    numbers = {number for handlers in _alive() for number in handlers.numbers()}
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _give_way() -> None:
    for handlers in reversed(_alive()):
        handlers.restore()
    _release()
