"""Lines of code as their author knows them: `train.py:12`, in a notebook `cell In[3], line 2`.

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
_NOT_THE_USERS = (_PACKAGE, contextlib.__file__, f"{Path('site-packages', 'torch')}{os.sep}")


def line_name(filename: str, lineno: int) -> str:
    """`train.py:12`, or `cell In[3], line 2` where the code was typed into IPython or a notebook."""
    try:
        label = sys.modules["IPython"].get_ipython().compile.format_code_name(filename)
    except Exception:  # no IPython, or one that names its cells in another way
        label = None
    return f"{label[0].lower()} {label[1]}, line {lineno}" if label else f"{Path(filename).name}:{lineno}"


def is_users(filename: str) -> bool:
    """Whether a file is neither the standard library's nor of an installed package, ours included."""
    # The user's own site-packages, and Debian's dist-packages, lie elsewhere.
    return not filename.startswith(_foreign()) and "-packages/" not in Path(filename).as_posix()


@cache
def _foreign() -> tuple[str, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return ("<frozen ", *[f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], *folders)])


def user_place(frame: Any = None) -> str:
    """file:line of the first frame outside this package (and what calls back into it), of `frame`."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and _is_plumbing(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_plumbing(filename: str) -> bool:
    return filename.startswith(_NOT_THE_USERS[:2]) or _NOT_THE_USERS[2] in filename
