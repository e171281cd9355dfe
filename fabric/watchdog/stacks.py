"""The position of a thread of this process in user code, and a check that it is blocked."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torch.nn import Module

from fabric.core.source import format_line, is_user_code
from fabric.utilities.init import name_of_parameter
from fabric.watchdog._torch import BACKWARD_FUNCTION, DISPATCH_FILES

if TYPE_CHECKING:
    from types import FrameType

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_LOADER = f"{_PACKAGE}data{os.sep}loader.py"
_BATCH_S = 1.0
"""Seconds from which on a wait for a batch is reported."""
_LOADER_WAITS = ("_received", "__iter__")
_WRAPPER_NAMES = ("wrapper", "call")  # functions of torch and of this package around each verb
_IDLE_SHARE = 0.02
"""A blocked thread uses less than this share of a core."""


def line_of_thread(thread: int) -> str:
    """Return the innermost line of user code of a thread, as `train.py:31 in main`; "" if it has ended.

    Args:
        thread: Its identifier, from `threading.get_ident()`.
    """
    innermost = frame = sys._current_frames().get(thread)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    shown = frame or innermost
    return "" if shown is None else f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"


class BlockedThread:
    """Detects by polling that a thread is blocked in `torch.distributed` or in a backward.

    A thread that is at the same place in two polls and used no processor time between them is blocked. Costs
    the thread nothing. Without a clock of the thread's time (macOS), a busy backward counts as blocked.

    Args:
        thread: Its identifier.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        has_clock = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(thread) if has_clock else None
        self._since = self._polled = self._used = 0.0
        self._position: tuple[int, int] | None = None
        self.unmoved_since: float | None = None
        """Since when the thread has been at one place, busy or not, in any code; None: it has ended."""

    def poll(self) -> tuple[str, float] | None:
        """Return the call that blocks the thread, and the time of the first poll in it.

        None: the thread runs, or is in user code.
        """
        frame, now = sys._current_frames().get(self._thread), time.monotonic()
        if frame is None:
            self._position = self.unmoved_since = None
            return None
        position, used = (id(frame), frame.f_lasti), 0.0
        if self._clock is not None:
            used = time.clock_gettime(self._clock)
        if position != self._position:
            self._position, self.unmoved_since = position, now
        if self.unmoved_since == now or used - self._used > _IDLE_SHARE * (now - self._polled):
            self._since = now
        self._polled, self._used = now, used
        call = _blocking_call(frame)
        return None if call is None or self._since == now else (call, self._since)


def batch_wait(thread: int) -> tuple[str, float] | None:
    """Return the loader in which a thread waits, with the line of its loop, and the start; None: no loader.

    Reads the frames of `FabricDataLoader`, in which the start of each wait is a local: no cost per batch.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename == _LOADER and frame.f_code.co_name in _LOADER_WAITS:
            begin, line = frame.f_locals.get("begin"), frame.f_back
            while line is not None and not is_user_code(line.f_code.co_filename):
                line = line.f_back
            at = "" if line is None else f" at {format_line(line.f_code.co_filename, line.f_lineno)}"
            waited = 0.0 if begin is None else time.perf_counter() - begin
            return (f"the loader{at}", time.monotonic() - waited) if waited > _BATCH_S else None
        frame = frame.f_back
    return None


def _blocking_call(frame: FrameType) -> str | None:
    """Return the name of the call in which a thread's innermost frame waits for ranks; None: it does not."""
    # The thread runs meanwhile: `f_back` of a frame that returned is None.
    while any([part in frame.f_code.co_filename for part in DISPATCH_FILES]) and (caller := frame.f_back):
        frame = caller
    if frame.f_code.co_name == BACKWARD_FUNCTION:
        return "backward"
    name = frame.f_code.co_filename
    if name.startswith(_PACKAGE):
        return _entry(frame, _PACKAGE).f_code.co_name
    if _DISTRIBUTED not in name:
        return None
    entry = _entry(frame, _DISTRIBUTED)
    return f"torch.distributed: {entry.f_code.co_name}{_layer_of(entry)}"


def _entry(frame: FrameType, part: str) -> FrameType:
    """Return the frame of the outermost function of the files whose path contains `part`."""
    entry = frame
    while (caller := frame.f_back) and any([p in caller.f_code.co_filename for p in (part, "contextlib")]):
        frame = caller
        if part in frame.f_code.co_filename and frame.f_code.co_name not in _WRAPPER_NAMES:
            entry = frame
    return entry


def _layer_of(frame: FrameType) -> str:
    """Return ` of Sequential (two.0.weight)`, if FSDP gathers the parameters of a layer in this frame."""
    layer = frame.f_locals.get("module")
    if not isinstance(layer, Module):
        return ""
    # The first only: this runs at each poll, and the layer may be the whole model.
    first = "no parameter"
    with suppress(RuntimeError):  # the main thread changes the layer
        first = next((name for p in layer.parameters() if (name := name_of_parameter(p))), first)
    return f" of {type(layer).__name__.removeprefix('FSDP')} ({first})"
