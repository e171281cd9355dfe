"""Attach a rank to the process that started it: it is killed when its parent dies, and reports its failure.

Used by environments and launchers. Imports no torch, does nothing on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NoReturn

from fabric.core.source import is_user_code, user_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

PARENT_PID = "FABRIC_PARENT_PID"
"""Set in ranks that a supervisor started: the process id of that supervisor."""
REPORT_FD = "FABRIC_REPORT_FD"
"""Set in ranks that a supervisor started: the descriptor of a pipe for the rank's `RankExit`."""
LAUNCHED = "FABRIC_LAUNCHED"
"""Set in ranks that Fabric started: "script", "cli", or "function" (the launching process has the store)."""
JOINED = "FABRIC_JOINED"
"""Set by a rank in its own environment by `Fabric(...)`: its process id, and its place in the job."""
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
"""Variables that identify a rank, as torchrun sets them."""
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""Those that differ between the ranks of a job, or between jobs."""

_PR_SET_PDEATHSIG = 1
_ORPHAN_S = 0.3
_POLL_INTERVAL_S = 0.5
_attached = False
_link: connection.Connection[Any, Any] | None = None
"""Connection to the supervisor that started this rank."""


def report_to_supervisor() -> None:
    """Report a fatal exception of this rank to the supervisor that started it, from now on.

    Does nothing in other processes. Call it from the main thread; a second call does nothing.
    """
    global _link
    parent = os.environ.get(PARENT_PID, "")
    if _link is not None or not parent.isdigit() or os.getppid() != int(parent):
        return
    with contextlib.suppress(OSError, ValueError):
        descriptor = int(os.environ.get(REPORT_FD, ""))
        os.set_inheritable(descriptor, False)  # subprocesses of this rank must not keep the pipe open
        link: connection.Connection[Any, Any] = connection.Connection(descriptor, readable=False)
        report_exceptions(link)
        report_exits(lambda _, status: send_exit(link, status))
        _link = link


def attach_to_supervisor() -> None:
    """Have this rank killed when its supervisor dies, and report to the supervisor that it joined the job.

    Does nothing in a process that no supervisor of Fabric started, nor in a subprocess of a rank. Call it
    from the main thread; a second call does nothing.
    """
    global _attached
    parent = os.environ.get(PARENT_PID, "")
    if _attached or not parent.isdigit():
        return
    if os.getppid() == int(parent):
        _attached = True
        die_with_parent(int(parent))
        report_to_supervisor()
        if _link is not None:
            with contextlib.suppress(OSError):
                _link.send_bytes(pickle.dumps(None))  # message: this rank has joined the job
        return
    try:
        os.kill(int(parent), 0)
    except PermissionError:
        return
    except ProcessLookupError:
        os._exit(1)  # the parent died while this process was still importing


def die_with_parent(parent: int) -> None:
    """Have this process killed as soon as process `parent`, or the thread that started this one, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        _die_after(lambda: _until_orphaned(parent))
    if os.getppid() != parent:
        os._exit(1)


def die_with_creator() -> None:
    """Have this process killed as soon as the process that created it by `multiprocessing` ends.

    Any start method. Errors that the end of the creator causes in threads are not printed.
    """
    creator = multiprocessing.parent_process()
    if creator is None:
        return
    sentinel, previous = creator.sentinel, sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if not connection.wait([sentinel], _ORPHAN_S):
            previous(kind, error, tb)

    sys.excepthook = excepthook
    _die_after(lambda: connection.wait([sentinel]))  # a pipe, closed at any kind of end of the creator


def report_exceptions(link: connection.Connection[Any, Any]) -> None:
    """Send an exception that ends this process to its supervisor, as a `RankExit`."""
    previous, owner = sys.excepthook, os.getpid()

    def report(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if os.getpid() != owner:  # a process that this rank forked
            previous(kind, error, tb)
            return
        # Taken first: other ranks fail only after this one's exit, so their times are later.
        when = time.monotonic()
        from fabric.launch.rank_exit import RankExit, deferred_traceback, describe, hide_library_frames

        reason = describe(error, tb)
        with hide_library_frames(error, tb) as (shown, hidden):
            trace = deferred_traceback(error, reason, shown, hidden)
            try:
                link.send_bytes(pickle.dumps(tuple(RankExit(when, reason[:1000], trace))))
            except OSError:
                trace = ""
            if not trace:  # else the supervisor prints it, if no other rank failed before
                sys.stderr.write(hidden)
                previous(kind, error, shown)

    sys.excepthook = report


exit_listeners: list[Callable[[ReportedExit, Any], object]] = []
"""Called with the exception of `sys.exit` that ends this process, and its status, in this order."""


class ReportedExit(SystemExit):
    """The exception of `sys.exit`: listeners receive the status that ends the process.

    Python has no other way to get it before the process has ended.

    Args:
        status: The argument of `sys.exit`.
        is_secondary: Whether the failure of another rank is the cause.
    """

    def __init__(self, status: Any, *, is_secondary: bool = False) -> None:
        super().__init__(*() if status is None else (status,))
        self.is_secondary = is_secondary
        self.place = _line_of_user()
        """There is no traceback any more when the status is read."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "code" and sys._getframe().f_back is None:  # the interpreter reads it, at exit
            for listener in [*exit_listeners]:
                listener(self, value)
            if isinstance(value, int):
                from fabric.launch.rank_exit import exit_reason

                return exit_reason(value)[0]
        return value


def _line_of_user() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return user_line(frame)


def report_exits(listener: Callable[[ReportedExit, Any], object]) -> None:
    """Call `listener` when `sys.exit` ends this process from its main thread, until it is removed from
    `exit_listeners`.
    """
    exit_listeners.append(listener)
    owner = os.getpid()

    def exit_and_report(status: Any = None) -> NoReturn:
        in_main_thread = threading.current_thread() is threading.main_thread()
        raise (ReportedExit(status) if in_main_thread and os.getpid() == owner else SystemExit(status))

    if type(sys.exit) is type(sys.getrefcount):  # the built-in, not patched
        sys.exit = functools.wraps(sys.exit)(exit_and_report)


def send_exit(link: connection.Connection[Any, Any], status: Any) -> int:
    """Send the status of `sys.exit` to the supervisor, unless it is 0; return the exit code."""
    from fabric.launch.rank_exit import RankExit, exit_reason

    code, reason = exit_reason(status)
    if code:
        with contextlib.suppress(OSError):
            link.send_bytes(pickle.dumps(tuple(RankExit(time.monotonic(), reason[:1000], code=code))))
    return code


def mark_rank() -> None:
    """Mark this process as a rank (of Fabric, torchrun or others), so that its subprocesses are not ranks."""
    if not os.environ.keys().isdisjoint((LAUNCHED, "TORCHELASTIC_RUN_ID", "LOCAL_RANK")):
        own = {name: os.environ[name] for name in _PLACE if name in os.environ}
        os.environ[JOINED] = f"{os.getpid()}:{json.dumps(own)}"


def parent_rank() -> tuple[str, bool]:
    """Return the id of the rank that started this process, and whether it is another rank itself.

    It is if a launcher, or that rank, has set another place in a job since. The id is "" for a rank itself.
    """
    process, _, text = os.environ.get(JOINED, "").partition(":")
    if process in ("", str(os.getpid())):
        return "", False
    try:
        marked = dict(json.loads(text))
    except (TypeError, ValueError):  # of another version of Fabric
        marked = {}
    size, ranks_here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    has_own_port = os.environ.get("MASTER_PORT") != marked.get("MASTER_PORT")
    if size is None or (size == "1" and (not has_own_port or ranks_here != "1")):
        return process, False  # alone: an evaluation, for instance
    # Fabric sets others later, in `launch`, but the port only in processes that it starts.
    has_new_port = "MASTER_PORT" in os.environ and "MASTER_PORT" not in marked
    changed = [os.environ.get(name, value) != value for name, value in marked.items()]
    return process, any(changed) or has_new_port


def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_INTERVAL_S)


def _die_after(wait: Callable[[], object]) -> None:
    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="fabric-lifeline").start()
