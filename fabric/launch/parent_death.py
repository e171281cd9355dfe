"""The tie between a rank and the process that started it: it dies with its parent and tells why it fails.

Used by environments and launchers. Imports no torch, does nothing on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

PARENT_PID = "FABRIC_PARENT_PID"
"""Set in ranks that a supervisor started: the process to die with."""
REPORT_FD = "FABRIC_REPORT_FD"
"""Set in ranks that a supervisor started: a pipe for the `RankExit` of a rank that an exception ends."""
JOINED = "FABRIC_JOINED"
"""Set by a rank in its own environment, from `Fabric(...)` on: its process, and MASTER_PORT."""

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
            link: connection.Connection[Any, Any] = connection.Connection(descriptor, readable=False)
            link.send_bytes(pickle.dumps(None))  # it has joined the job
            report_exceptions(link)
            report_exits(lambda status: send_exit(link, status))
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


class NotedExit(SystemExit):
    """The exception of `sys.exit` in a rank: `note` receives the status that ends the process.

    Python has no other way to know it before the process has ended.
    """

    def __init__(self, status: Any, note: Callable[[Any], object]) -> None:
        super().__init__(*() if status is None else (status,))
        self._note = note

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "code" and sys._getframe().f_back is None:  # Python itself reads it, at the end
            self._note(value)
        return value


def report_exits(note: Callable[[Any], object]) -> None:
    """Call `note` with the status by which `sys.exit` ends this process from its main thread."""
    owner = os.getpid()

    def leave(status: Any = None) -> NoReturn:
        in_main = threading.current_thread() is threading.main_thread()
        raise (NotedExit(status, note) if in_main and os.getpid() == owner else SystemExit(status))

    if type(sys.exit) is type(sys.getrefcount):  # Python's own
        sys.exit = functools.wraps(sys.exit)(leave)


def send_exit(link: connection.Connection[Any, Any], status: Any) -> int:
    """Send the status of `sys.exit` to the supervisor, unless it is 0; returns the exit code."""
    from fabric.launch.rank_exit import RankExit, exit_reason

    code, reason = exit_reason(status)
    if code:
        with contextlib.suppress(OSError):
            link.send_bytes(pickle.dumps(tuple(RankExit(time.monotonic(), reason[:1000], code=code))))
    return code


def mark_rank() -> None:
    """Mark this process as a rank of ours or of torchrun, for processes that it starts: they are none."""
    if not os.environ.keys().isdisjoint(("FABRIC_LAUNCHED", "TORCHELASTIC_RUN_ID")):
        os.environ[JOINED] = f"{os.getpid()}:{os.environ.get('MASTER_PORT')}"


def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)


def _die_after(wait: Callable[[], object]) -> None:
    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="fabric-lifeline").start()
