"""The tie between a rank and the process that started it: it dies with its parent and tells why it fails.

Used by environments and launchers. Imports no torch, does nothing on import.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from multiprocessing import connection
from typing import TYPE_CHECKING, NamedTuple

from fabric.core.errors import CollectiveMismatch, RankError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

PARENT_PID = "FABRIC_PARENT_PID"
"""Set in ranks that a supervisor started: the process to die with."""
LIFELINE_FD = "FABRIC_LIFELINE_FD"
"""Set in ranks that a supervisor started: a pipe that ends when the process to die with does."""
REPORT_FD = "FABRIC_REPORT_FD"
"""Set in ranks that a supervisor started: a pipe for the `Ending` of a rank that an exception ends."""

_PR_SET_PDEATHSIG = 1
_LONGEST_TRACE = 16_000  # of a pipe's 64 KiB: nobody must read it for the rank to end
# How a rank fails because another one is gone: gloo, NCCL and the TCPStore, as their messages read.
_CONSEQUENCE = re.compile(
    # Errors of these types: a download has others for a connection that was reset.
    r"^(RuntimeError|RankError|Dist\w*Error): .*(connection (was )?(closed|reset|refused)|broken pipe"
    r"|pair closure|remote process exited|recv(value)?.*failed|failed to recv|socket (was )?closed"
    r"|lost rank zero's store|ncclRemoteError|NCCL communicator was abort)|^DistNetworkError"
    r"|, raised by rank \d+$|^RankError: .* failed on rank \d+: rank [\d, ]+ ended",
    re.IGNORECASE,
)
_ORPHAN_S = 0.3
_OF_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)")
_QUOTED = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)
_tied = False


class Ending(NamedTuple):
    """What a rank says at its end to the process that started it: a pickled tuple, by a pipe."""

    when: float
    """Of `time.monotonic()`."""
    reason: str | None = None
    """None: it ended well."""
    trace: str = ""
    """The traceback, where the rank does not print it."""
    code: int = 1
    result: bytes | None = None


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
        pipe = os.environ.get(LIFELINE_FD, "")
        if pipe.isdigit():
            os.set_inheritable(int(pipe), False)
            _die_after(lambda: os.read(int(pipe), 1))  # nothing is ever written: the other end has closed
        else:
            die_with_parent(int(parent))
        _report_exceptions(os.environ.get(REPORT_FD, ""))
    elif not _alive(int(parent)):
        os._exit(1)  # the parent died while this process was still importing


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process as soon as the *thread* of process `parent` that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
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


def is_consequence(reason: str) -> bool:
    """Whether the end of a rank reads as if another one had gone before."""
    return _CONSEQUENCE.search(reason) is not None


def describe(error: BaseException, tb: TracebackType | None = None) -> str:
    """`ValueError: boom (train.py:31)`: type, first line of the message, and the user's line that raised."""
    from fabric.core.source import is_users, line_name  # only where something has failed

    lines = str(error).strip().splitlines() or [""]
    frames = [
        (frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(tb or error.__traceback__)
    ]
    text, where = (f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__), ""
    if worker := _OF_WORKER.match(lines[0]):  # torch quotes the traceback of a loader's worker
        text, where = lines[-1], f", in {worker[1]}"
        frames += [(file, int(number)) for file, number in _QUOTED.findall(str(error))]
    own = [frame for frame in frames if is_users(frame[0])]
    text = f"{text} ({line_name(*own[-1])}{where})" if own else f"{text}{where}"
    rank = getattr(error, "fabric_raised_by", None)
    return text if rank is None else f"{text}, raised by rank {rank}"


def _report_exceptions(descriptor: str) -> None:
    if not descriptor.isdigit():
        return
    previous, owner = sys.excepthook, os.getpid()

    def report(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if os.getpid() != owner:  # a fork of this rank, whose end is not the rank's
            previous(kind, error, tb)
            return
        # Before anything else: the peers notice this rank's end only afterwards, so theirs have later times.
        when, reason = time.monotonic(), describe(error, tb)
        trace = _trace(error, tb) if _is_echo(error, reason) else ""
        try:
            link.send_bytes(pickle.dumps(tuple(Ending(when, reason[:1000], trace))))
        except OSError:
            trace = ""
        if not trace:  # else the supervisor prints it, once it knows that nothing else came before
            previous(kind, error, tb)

    try:
        os.set_inheritable(int(descriptor), False)  # subprocesses of this rank must not keep the pipe open
        link = connection.Connection(int(descriptor), readable=False)
    except OSError:
        return
    sys.excepthook = report


def _is_echo(error: BaseException, reason: str) -> bool:
    """Whether another rank has more to say, or says the same."""
    alike = isinstance(error, CollectiveMismatch | RankError | KeyboardInterrupt)
    return is_consequence(reason) or (alike and _rank() != 0)


def _trace(error: BaseException, tb: TracebackType | None) -> str:
    text = "".join(traceback.format_exception(type(error), error, tb))[-_LONGEST_TRACE:]
    return "".join([f"[rank{_rank()}]: {line}\n" for line in text.splitlines()])


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


def _die_after(wait: Callable[[], object]) -> None:
    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="fabric-lifeline").start()
