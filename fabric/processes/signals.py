"""Signals heard in a thread, and ends by a signal. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TOGETHER_S = 0.5
"""Signals of a kind within so many seconds are one: a scheduler tells all processes, and a launcher passes it
on."""


class Listener:
    """Hears signals in a thread of its own, also while the main thread is deep in native code.

    Only of signals that have a handler in Python. Made in another thread than the main one, it hears nothing.

    Args:
        act: Called in that thread with the number of each signal.
    """

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        if threading.current_thread() is not threading.main_thread():
            return
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._next = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, daemon=True, name="fabric-signals").start()

    def _listen(self) -> None:
        while numbers := os.read(self._reader, 64):
            if self._next != -1:
                with contextlib.suppress(OSError):
                    os.write(self._next, numbers)
            for number in numbers:
                self._act(number)

    def _forget(self) -> None:
        # A child's signals would be heard here as the parent's.
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


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
