"""Ends by a signal. Imports no torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time

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
