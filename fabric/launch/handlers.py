"""Signal handlers that stand in front of others and give way to them. Imports no torch."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType


class Handlers:
    """Handlers for some signals of this process; in a forked child what stood there before is back.

    A child with a handler of Python's would not end by a signal while it is deep in native code.

    Signals can only be taken in the main thread; made in another one, this does nothing.

    Args:
        numbers: The signals.
        act: Called with the signal's number and what stood here before (a callable, SIG_DFL or SIG_IGN).
    """

    def __init__(self, numbers: Iterable[int], act: Callable[[int, Any], None]) -> None:
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
        self._act(number, before)
        if callable(before):
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
