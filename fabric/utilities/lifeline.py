"""The tie between a rank and the process that started it: it dies with its parent and tells why it fails.

Used by environments and launchers. Imports no torch, does nothing on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

PARENT_PID = "FABRIC_PARENT_PID"
"""Set in ranks that a supervisor started: the process to die with."""
REPORT_FD = "FABRIC_REPORT_FD"
"""Set in ranks that a supervisor started: a pipe for one line about the exception that ends the rank."""

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_PR_SET_PDEATHSIG = 1
_tied = False


def tie_to_parent() -> None:
    """Keep what a rank owes its supervisor: die with it, report the exception that ends this process.

    Does nothing in a process that no supervisor of ours started, nor in a subprocess of a rank. Call it from
    the main thread; a second call does nothing.
    """
    global _tied
    parent = os.environ.get(PARENT_PID, "")
    if _tied or not parent.isdigit():
        return
    if os.getppid() == int(parent):
        _tied = True
        die_with_parent(int(parent))
        _report_exceptions(os.environ.get(REPORT_FD, ""))
    elif not _alive(int(parent)):
        os._exit(1)  # the parent died while this process was still importing


def die_with_parent(parent: int) -> None:
    """Have this process killed (SIGKILL) as soon as process `parent`, its parent, ends in whatever way."""
    if sys.platform == "linux":
        # The kernel watches the *thread* that started us; launchers start ranks from one that outlives them.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=_poll_parent, args=(parent,), daemon=True, name="fabric-lifeline").start()


def describe(error: BaseException, tb: TracebackType | None = None) -> str:
    """`ValueError: boom (train.py:31)`: type, first line of the message, and the user's line that raised."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = traceback.extract_tb(tb or error.__traceback__)
    foreign = ("site-packages", f"{os.sep}lib{os.sep}python", _PACKAGE, "<frozen")
    own = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else text


def _report_exceptions(descriptor: str) -> None:
    if not descriptor.isdigit():
        return
    pipe, previous = int(descriptor), sys.excepthook

    def report(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        # Before anything else: the peers notice this rank's end only afterwards, so theirs have later times.
        line = json.dumps({"rank": _rank(), "when": time.monotonic(), "reason": describe(error, tb)[:1000]})
        with contextlib.suppress(OSError):
            os.write(pipe, line.encode() + b"\n")
        previous(kind, error, tb)

    try:
        os.set_inheritable(pipe, False)  # subprocesses of this rank must not keep the pipe open
    except OSError:
        return
    sys.excepthook = report


def read_reports(descriptor: int, rest: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """All whole lines that wait in a non-blocking pipe, and the unfinished rest (pass it next time)."""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, 65536):
            rest += chunk
    *lines, rest = rest.split(b"\n")
    return [json.loads(line) for line in lines], rest


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
