"""Entry point of a process made by spawn, fork or forkserver: set the rank, run the function, report the end.

Imports no torch, so that the number of threads is set before torch is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ArgumentTypeError
from fabric.core.pickles import pickling_error
from fabric.launch.garbage import forked
from fabric.launch.parent_death import die_with_creator, die_with_parent
from fabric.launch.rank_exit import RankExit, describe, exit_reason
from fabric.launch.signals import flush_output

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True, slots=True)
class Task:
    """The function call that a rank runs. `call` is pickled bytes, or the objects themselves under fork."""

    variables: dict[str, str]
    """The rank's environment. A fork server would not pass it on."""
    call: bytes | tuple[Any, ...]
    parent: int | None
    """The launching process, where it makes this one itself (forkserver does not)."""
    start_method: str | None
    """The parent's own choice for its children; None: the system's. Loaders here make their workers so."""
    streams: tuple[int, int] | None = None
    """Where to print, under fork; None: where the parent does."""


def run_rank(task: Task, link: Connection) -> None:
    """Run one rank to its end and send exactly one `RankExit`."""
    forked()
    if task.parent is None:  # a fork server lives as long as its children
        die_with_creator()
    else:
        die_with_parent(task.parent)
    for number, writer in enumerate(task.streams or (), 1):  # also what is not Python's
        os.dup2(writer, number)
        os.close(writer)
        stream = open(number, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, ("stdout", "stderr")[number - 1], stream)
    usual = multiprocessing.get_all_start_methods()[0]
    multiprocessing.set_start_method(task.start_method or usual, force=True)  # not that of this launch
    os.environ.clear()
    os.environ.update(task.variables)
    owner, fork = os.getpid(), task.parent is None or not isinstance(task.call, bytes)
    if fork:
        atexit._clear()  # what the parent is to do at its end
    try:
        ending = RankExit(time.monotonic(), result=_call(task))
    except BaseException as error:
        ending = _ending_of(error)
    if os.getpid() != owner:  # a process that the rank has forked by hand has come back to here
        sys.stderr.write(ending.trace)
        flush_output()
        os._exit(0 if ending.reason is None else ending.code)
    if fork and ending.reason is None:
        atexit._run_exitfuncs()  # multiprocessing would not; the other ranks hear that this one left
    flush_output()  # the parent may end this process as soon as it knows
    with contextlib.suppress(BrokenPipeError):
        link.send_bytes(pickle.dumps(tuple(ending)))
        link.close()
    if ending.reason is not None:
        sys.exit(ending.code)


def _call(task: Task) -> bytes | None:
    function, args, kwargs = pickle.loads(task.call) if isinstance(task.call, bytes) else task.call
    result = function(*args, **kwargs)
    if task.variables["LOCAL_RANK"] != "0":
        return None
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise ArgumentTypeError(
            "The function's result cannot be sent back to the launching process, because it cannot be "
            f"pickled ({pickling_error(error, result, 'result')}). Return plain data and tensors (for a "
            "model its state_dict())."
        ) from error


def _ending_of(error: BaseException) -> RankExit:
    when = time.monotonic()
    if isinstance(error, KeyboardInterrupt):
        return RankExit(when, "KeyboardInterrupt", code=128 + signal.SIGINT)
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        code, reason = exit_reason(error.code)
        return RankExit(when, reason if code else None, code=code)
    # The frames of this module say nothing to the user: the traceback starts at the user's function.
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    trace = "".join(traceback.format_exception(error.with_traceback(tb))) if tb is not None else ""
    return RankExit(when, describe(error), trace)
