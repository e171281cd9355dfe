"""Where a thread of this process is, in the user's own code. Imports no torch."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_FOREIGN = (
    str(Path(__file__).resolve().parent.parent),
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    sysconfig.get_paths()["platlib"],
    "<frozen",
)


def user_line(thread: int) -> str:
    """`train.py:31 in main`: the innermost line of the user's code that a thread is at; "" if it has ended.

    Args:
        thread: Its identifier, as `threading.get_ident()` gives it.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    own = _users(frame) or frame
    return f"{own.f_code.co_filename}:{own.f_lineno} in {own.f_code.co_name}"


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_FOREIGN):
        frame = frame.f_back
    return frame
