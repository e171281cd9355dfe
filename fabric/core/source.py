"""Source lines in messages: `train.py:12`, in a notebook `cell In[3], line 2`.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = (_PACKAGE, contextlib.__file__, f"{Path('site-packages', 'torch')}{os.sep}")


def format_line(filename: str, lineno: int) -> str:
    """Return `train.py:12`, or `cell In[3], line 2` for code of IPython or a notebook."""
    try:
        label = sys.modules["IPython"].get_ipython().compile.format_code_name(filename)
    except Exception:  # no IPython, or a version without this method
        label = None
    return f"{label[0].lower()} {label[1]}, line {lineno}" if label else f"{Path(filename).name}:{lineno}"


def is_user_code(filename: str) -> bool:
    """Whether a file belongs neither to the standard library nor to an installed package, nor to this one."""
    # `~/.local`'s site-packages and Debian's dist-packages are not in `sysconfig`.
    return not filename.startswith(_installed()) and "-packages/" not in Path(filename).as_posix()


@cache
def _installed() -> tuple[str, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return ("<frozen ", *[f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], *folders)])


def user_line(frame: Any = None) -> str:
    """Return file:line of the innermost frame outside this package, torch and contextlib, from `frame` up."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def library_frames() -> int:
    """Return the number of the caller's innermost frames inside this package, torch and contextlib.

    1 in a thread that has no others.
    """
    frame, count = sys._getframe(1), 0
    while _is_library(frame.f_code.co_filename):
        if frame.f_back is None:
            return 1
        frame, count = frame.f_back, count + 1
    return count


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES[:2]) or _LIBRARIES[2] in filename
