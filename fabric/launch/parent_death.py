"""The tie between a rank and the process that started it: it dies with its parent and tells why it fails.

Used by environments and launchers. Imports no torch, does nothing on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

PARENT_PID = "FABRIC_PARENT_PID"
"""Set in ranks that a supervisor started: the process to die with."""
REPORT_FD = "FABRIC_REPORT_FD"
"""Set in ranks that a supervisor started: a pipe for the `RankExit` of a rank that an exception ends."""
JOINED = "FABRIC_JOINED"
"""Set by a rank that has joined its job, in its own environment: its process, and MASTER_PORT."""

_PR_SET_PDEATHSIG = 1
_ORPHAN_S = 0.3
_LOOK_S = 0.5
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
        with contextlib.suppress(OSError, ValueError):
            descriptor = int(os.environ.get(REPORT_FD, ""))
            os.set_inheritable(descriptor, False)  # subprocesses of this rank must not keep the pipe open
            report_exceptions(connection.Connection(descriptor, readable=False))
        return
    try:
        os.kill(int(parent), 0)
    except PermissionError:
        return
    except ProcessLookupError:
        os._exit(1)  # the parent died while this process was still importing


def die_with_parent(parent: int) -> None:
    """Have this process killed as soon as process `parent` ends, or its thread that started this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        _die_after(lambda: _until_orphaned(parent))
    if os.getppid() != parent:
        os._exit(1)


def die_with_creator() -> None:
    """Have this process, which `multiprocessing` has made in whatever way, killed as soon as its maker ends.

    What its threads fail at for want of the maker is not printed.
    """
    creator = multiprocessing.parent_process()
    if creator is None:
        return
    sentinel, previous = creator.sentinel, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if not connection.wait([sentinel], _ORPHAN_S):
            previous(kind, error, tb)

    sys.excepthook = hook
    _die_after(
        lambda: connection.wait([sentinel])
    )  # a pipe, which closes when the maker dies, however it dies


def report_exceptions(link: connection.Connection[Any, Any]) -> None:
    """Send an exception that ends this process to its supervisor, as an `RankExit`."""
    previous, owner = sys.excepthook, os.getpid()

    def report(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if os.getpid() != owner:  # a fork of this rank, whose end is not the rank's
            previous(kind, error, tb)
            return
        # Before anything else: the peers notice this rank's end only afterwards, so theirs have later times.
        when = time.monotonic()
        from fabric.launch.rank_exit import RankExit, deferred_traceback, describe

        reason = describe(error, tb)
        trace = deferred_traceback(error, reason, tb)
        try:
            link.send_bytes(pickle.dumps(tuple(RankExit(when, reason[:1000], trace))))
        except OSError:
            trace = ""
        if not trace:  # else the supervisor prints it, once it knows that nothing else came before
            previous(kind, error, tb)

    sys.excepthook = report


def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)


def _die_after(wait: Callable[[], object]) -> None:
    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="fabric-lifeline").start()
