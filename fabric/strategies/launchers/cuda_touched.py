"""Which line initialised CUDA in this process: noted as it happens."""

from __future__ import annotations

import linecache
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from fabric.core.source import is_users, line_name
from fabric.core.torch_internals import call_when_cuda_starts

if TYPE_CHECKING:
    from types import FrameType

_watching = False
_noted = ""


def watch_cuda() -> None:
    """Have torch note the line that initialises CUDA in this process. Costs nothing; a second call, too."""
    global _watching
    if not _watching and not torch.cuda.is_initialized():
        call_when_cuda_starts(_note)
        _watching = True


def cuda_line() -> str:
    """`by train.py:12 (model.cuda())`, or "" if it ran before `watch_cuda`."""
    return _noted


def _note() -> None:
    global _noted
    with suppress(Exception):  # torch would take it for a failure of CUDA
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            filename, lineno = frame.f_code.co_filename, frame.f_lineno
            line = linecache.getline(filename, lineno, frame.f_globals).strip()
            _noted = f"by {line_name(filename, lineno)} ({line})"
