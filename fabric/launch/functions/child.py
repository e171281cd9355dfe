"""Entry point of a process of spawn, fork or forkserver: set the rank, run the function, report the exit.

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
from fabric.launch.garbage import after_fork
from fabric.launch.parent_death import die_with_creator, die_with_parent
from fabric.launch.rank_exit import RankExit, describe, exit_reason
from fabric.launch.signals import flush_output

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


@dataclass(frozen=True, slots=True)
class Task:
    """The function call that a rank runs. `call` is pickled bytes, or the unpickled objects under fork."""

    variables: dict[str, str]
    """The rank's environment, which a fork server does not inherit from the launching process."""
    call: bytes | tuple[Any, ...]
    parent: int | None
    """The process id of the launching process if it is the parent; None under forkserver."""
    start_method: str | None
    """The launching process's multiprocessing start method, used for loader workers; None: the default."""
    streams: tuple[int, int] | None = None
    """Descriptors for stdout and stderr, under fork; None: those of the parent."""


def run_rank(task: Task, pipe: Connection) -> None:
    """Run one rank until it exits, and send exactly one `RankExit`."""
    after_fork()
    if task.parent is None:  # the parent is a fork server, which lives as long as its children
        die_with_creator()
    else:
        die_with_parent(task.parent)
    for number, writer in enumerate(task.streams or (), 1):  # for native code, too
        os.dup2(writer, number)
        os.close(writer)
        stream = open(number, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, ("stdout", "stderr")[number - 1], stream)
    default_method = multiprocessing.get_all_start_methods()[0]
    # Not the method of this launch.
    multiprocessing.set_start_method(task.start_method or default_method, force=True)
    os.environ.clear()
    os.environ.update(task.variables)
    pid, is_fork = os.getpid(), task.parent is None or not isinstance(task.call, bytes)
    if is_fork:
        atexit._clear()  # inherited handlers of the parent
    try:
        report = RankExit(time.monotonic(), result=_call(task))
    except BaseException as error:
        report = _exit_report(error)
    if os.getpid() != pid:  # a process that the user's function forked returned from it
        sys.stderr.write(report.trace)
        flush_output()
        os._exit(0 if report.reason is None else report.code)
    if is_fork and report.reason is None:
        atexit._run_exitfuncs()  # multiprocessing does not; one informs the other ranks of this exit
    flush_output()  # the parent may kill this process once it has the report
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(pickle.dumps(tuple(report)))
        pipe.close()
    if report.reason is not None:
        sys.exit(report.code)


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


def _exit_report(error: BaseException) -> RankExit:
    when = time.monotonic()
    if isinstance(error, KeyboardInterrupt):
        return RankExit(when, "KeyboardInterrupt", code=128 + signal.SIGINT)
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        code, reason = exit_reason(error.code)
        return RankExit(when, reason if code else None, code=code)
    # The traceback shown starts at the user's function, without the frames of this module.
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    trace = "".join(traceback.format_exception(error.with_traceback(tb))) if tb is not None else ""
    return RankExit(when, describe(error), trace)
