"""The position of a thread of this process in the user's own code, and a check that it is blocked."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fabric.core.source import format_line, is_user_code
from fabric.watchdog._torch import BACKWARD_FUNCTION, DISPATCH_FILES

if TYPE_CHECKING:
    from types import FrameType

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_LOADER = f"{_PACKAGE}data{os.sep}loader.py"
_BATCH_S = 1.0
"""A shorter wait for a batch is none."""
_WAITS_OF_LOADER = ("_received", "__iter__")
_AROUND = ("wrapper", "call")  # what torch and we put around each verb
_IDLE = 0.02
"""A thread that waits uses less than this share of a core."""


def user_line(thread: int) -> str:
    """`train.py:31 in main`: the innermost line of the user's code that a thread is at; "" if it has ended.

    Args:
        thread: Its identifier, as `threading.get_ident()` gives it.
    """
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    own = frame or innermost
    return "" if own is None else f"{own.f_code.co_filename}:{own.f_lineno} in {own.f_code.co_name}"


class StillWatch:
    """Sees from one look to the next whether a thread stands still where ranks wait for each other, of which
    nobody has told us: in `torch.distributed` itself, or a plain backward.

    A thread that is at the same place again and has used no processor time meanwhile has not moved. Costs the
    thread nothing. Where the system does not tell a thread's time (macOS), a busy backward looks the same.

    Args:
        thread: Its identifier.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        known = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(thread) if known else None
        self._since = self._looked = self._used = 0.0
        self._spot: tuple[int, int] | None = None
        self.stays: float | None = None
        """Since when the thread has been at one place, busy or not, in whatever code; None: it has ended."""

    def look(self) -> tuple[str, float] | None:
        """Return the call that blocks the thread, and the time of the first look at it.

        None: the thread runs, or is in the user's code.
        """
        frame, now = sys._current_frames().get(self._thread), time.monotonic()
        if frame is None:
            self._spot = self.stays = None
            return None
        spot, used = (id(frame), frame.f_lasti), 0.0
        if self._clock is not None:
            used = time.clock_gettime(self._clock)
        if spot != self._spot:
            self._spot, self.stays = spot, now
        if self.stays == now or used - self._used > _IDLE * (now - self._looked):
            self._since = now
        self._looked, self._used = now, used
        what = _waiting_in(frame)
        return None if what is None or self._since == now else (what, self._since)


def batch_wait(thread: int) -> tuple[str, float] | None:
    """The loader that a thread waits in, with the line of its loop, and since when; None: in no loader.

    Reads the frames of `FabricDataLoader`, which notes the begin of each wait: costs a batch nothing.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename == _LOADER and frame.f_code.co_name in _WAITS_OF_LOADER:
            begin, line = frame.f_locals.get("begin"), frame.f_back
            while line is not None and not is_user_code(line.f_code.co_filename):
                line = line.f_back
            at = "" if line is None else f" at {format_line(line.f_code.co_filename, line.f_lineno)}"
            waited = 0.0 if begin is None else time.perf_counter() - begin
            return (f"the loader{at}", time.monotonic() - waited) if waited > _BATCH_S else None
        frame = frame.f_back
    return None


def _waiting_in(frame: FrameType) -> str | None:
    """Return the name of the call that a thread's innermost frame waits in; None: it waits for no ranks."""
    # The thread runs meanwhile: a frame that has returned has no `f_back` any more.
    while any([part in frame.f_code.co_filename for part in DISPATCH_FILES]) and (caller := frame.f_back):
        frame = caller
    if frame.f_code.co_name == BACKWARD_FUNCTION:
        return "backward"
    name = frame.f_code.co_filename
    if name.startswith(_PACKAGE):
        return _entry(frame, _PACKAGE)
    return f"torch.distributed: {_entry(frame, _DISTRIBUTED)}" if _DISTRIBUTED in name else None


def _entry(frame: FrameType, part: str) -> str:
    """The name of the function by which other code has called this part of a path."""
    name = frame.f_code.co_name
    while (caller := frame.f_back) and any([p in caller.f_code.co_filename for p in (part, "contextlib")]):
        frame = caller
        if part in frame.f_code.co_filename and frame.f_code.co_name not in _AROUND:
            name = frame.f_code.co_name
    return name
