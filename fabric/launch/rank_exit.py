"""Reports of the exit of a rank: the text of an exception, the root cause, the last line of the job.

A secondary failure has a message that the exit of another rank causes. Imports no torch.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import traceback
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import CollectiveMismatch, FabricError, RankError
from fabric.core.messages import name_ranks
from fabric.core.source import format_line, is_user_code

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

FULL_TRACEBACK = "FABRIC_FULL_TRACEBACK"
"""Variable: 1 shows all frames of an error of this package."""
_LONGEST_TRACE = 16_000  # fits into a pipe's buffer of 64 KiB, so that writing never blocks the rank's exit
# Messages of gloo, NCCL and the TCPStore after the exit of another rank.
_SECONDARY_FAILURE = re.compile(
    # Errors of these types only: a download raises others when a connection is reset.
    r"^(RuntimeError|RankError|Dist\w*Error): .*(connection (was )?(closed|reset|refused)|broken pipe"
    r"|pair closure|remote process exited|recv(value)?.*failed|failed to recv|socket (was )?closed"
    r"|lost rank zero's store|ncclRemoteError|NCCL communicator was abort)|^DistNetworkError"
    r"|, raised by rank \d+$|^RankError: .* failed on rank \d+: ranks? [\d, -]+ ended",
    re.IGNORECASE,
)
_COLLECTIVE_FAILURE = re.compile(r"RankError: (\w+)\S*(?: at .*)? failed on rank \d.*\(([^()]+:\d+)\)$")
_CALLS_OF_ALL_RANKS = ("save", "load", "save_latest", "load_latest", "barrier")
"""Calls that loops make on one rank by mistake."""
_LOADER_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)")
_QUOTED = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


class RankExit(NamedTuple):
    """The exit report of a rank to the process that started it, sent as a pickled tuple by a pipe."""

    when: float
    """Time by `time.monotonic()`, which all processes of a machine share."""
    reason: str | None = None
    """"ValueError: boom (train.py:31)", "exit code 3", "killed by SIGKILL"; None: success."""
    trace: str = ""
    """The traceback, if the rank does not print it."""
    code: int = 1
    """The exit code of the job, if this is its root cause."""
    result: bytes | None = None
    rank: int = -1
    """Set by the receiver."""

    @property
    def is_secondary_failure(self) -> bool:
        """Whether the exit of another rank caused this one, by its message."""
        return self.reason is not None and is_secondary_failure(self.reason)


def is_secondary_failure(reason: str) -> bool:
    """Whether the exit of another rank caused this failure, by its message."""
    return _SECONDARY_FAILURE.search(reason) is not None


def describe(error: BaseException, tb: TracebackType | None = None) -> str:
    """Return a text such as `ValueError: boom (train.py:31)`.

    It has the type, the first line of the message (two, if it ends in a colon) and the user's raising line.
    """
    message = message_of(error)
    lines = message.strip().splitlines() or [""]
    if lines[0].endswith(":"):
        lines[:2] = [" ".join(map(str.strip, lines[:2]))]
    frames = [
        (frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(tb or error.__traceback__)
    ]
    text, location = (f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__), ""
    if worker := _LOADER_WORKER.match(lines[0]):  # torch quotes the traceback of a loader's worker
        text, location = lines[-1], f", in {worker[1]}"
        frames += [(file, int(number)) for file, number in _QUOTED.findall(message)]
    from fabric.core.advice import torch_advice

    text += torch_advice(text, frames[-1][0] if frames else "")
    user_frames = [frame for frame in frames if is_user_code(frame[0])]
    text = f"{text} ({format_line(*user_frames[-1])}{location})" if user_frames else f"{text}{location}"
    rank = getattr(error, "fabric_raised_by", None)
    return text if rank is None else f"{text}, raised by rank {rank}"


def message_of(error: Any) -> str:
    """Return the text of an exception or a status; an error of its `__str__` must not replace the failure."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # as Python's tracebacks have it


def deferred_traceback(error: BaseException, reason: str, tb: TracebackType | None, before: str) -> str:
    """Return the traceback if the supervisor should decide whether to print it, else "".

    It decides if the failure is secondary, or if all ranks raise the same error and this is not rank zero.
    `before` is a line above it.
    """
    rank = int(os.environ.get("RANK", "0"))
    same_on_all_ranks = isinstance(error, CollectiveMismatch | RankError | KeyboardInterrupt)
    if not is_secondary_failure(reason) and not (same_on_all_ranks and rank != 0):
        return ""
    text = before + "".join(traceback.format_exception(type(error), error, tb))[-_LONGEST_TRACE:]
    return "".join([f"[rank{rank}]: {line}\n" for line in text.splitlines()])


@contextmanager
def hide_library_frames(
    error: BaseException, tb: TracebackType | None
) -> Iterator[tuple[TracebackType | None, str]]:
    """Context in which the traceback of a `FabricError` ends with the user's line; yields it and a note.

    The note is a line with the number of hidden frames and the position of the innermost one; "": none.
    FABRIC_FULL_TRACEBACK=1 shows all. Other errors, and errors without a user's line, keep their traceback.
    Debuggers keep it in any case.
    """
    entries, entry = [], tb
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    user = [i for i, one in enumerate(entries) if is_user_code(one.tb_frame.f_code.co_filename)]
    hidden = entries[user[-1] + 1 :] if user else []
    if (
        not hidden
        or not isinstance(error, FabricError)
        or os.environ.get(FULL_TRACEBACK, "") not in ("", "0")
    ):
        yield tb, ""
        return
    shown = None
    for one in reversed(entries[: user[-1] + 1]):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    innermost = f"{hidden[-1].tb_frame.f_code.co_filename}:{hidden[-1].tb_lineno}"
    frames = (
        f"{len(hidden)} frames below your line are" if len(hidden) > 1 else "one frame below your line is"
    )
    note = f"fabric: {frames} hidden, up to {innermost}; {FULL_TRACEBACK}=1 shows them\n"
    error.__traceback__ = shown  # Python and torch print this, or the argument of the hook
    try:
        yield shown, note
    finally:
        error.__traceback__ = tb


def summary(
    cause: RankExit,
    stopped: Collection[int] = (),
    failures: Collection[RankExit] = (),
    multi_node: bool = False,
) -> str:
    """Return the last line of a failed job.

    Args:
        cause: The root cause.
        stopped: The ranks of this machine that were stopped because of it.
        failures: All failures; secondary ones are listed as stopped.
        multi_node: Whether there are ranks on other machines.
    """
    how = "lost a rank of another machine" if cause.is_secondary_failure and multi_node else "failed first"
    line = f"rank {cause.rank} on {socket.gethostname()} {how}: {cause.reason}"
    secondary = {failure.rank for failure in failures if failure.is_secondary_failure}
    stopped_ranks = {*stopped, *secondary} - {cause.rank}
    others = {failure.rank for failure in failures} - stopped_ranks - {cause.rank}
    if others:
        line += f"; {name_ranks(others)} failed, too"
    return f"{line}; {name_ranks(stopped_ranks)} stopped because of it" if stopped_ranks else line


def root_cause(failures: Collection[RankExit], finished: Collection[int] = ()) -> RankExit:
    """Return the failure that caused the others: the earliest that is not secondary.

    Args:
        failures: At least one.
        finished: Ranks that have exited successfully. If all failures are secondary, one of these exited
            too early.
    """
    cause = min(
        failures, key=lambda failure: (failure.is_secondary_failure, bool(failure.trace), failure.when)
    )
    if not cause.is_secondary_failure or not finished:
        return cause
    call = _COLLECTIVE_FAILURE.match(cause.reason or "")
    waits = f"waits in fabric.{call[1]} ({call[2]})" if call else f"still needed it ({cause.reason})"
    reason = f"finished (exit 0) while rank {cause.rank} {waits}"
    if call and call[1] in _CALLS_OF_ALL_RANKS:
        reason += ": is the call inside `if fabric.is_global_zero`?"
    return cause._replace(rank=min(finished), reason=reason)


_SIGNAL_CAUSES = {
    "SIGABRT": "native code aborted; gloo does this when ranks send tensors of different sizes",
    "SIGKILL": "by a user, a scheduler, or by Linux when memory ran out: see dmesg",
}
IMPORT_EXIT = 78  # EX_CONFIG of sysexits.h
"""The exit code of a rank whose import of the script called `launch`."""
CALLED_IN_IMPORT = (
    "launch() was called while a new rank imported this script. Put what starts the job under `if __name__ "
    '== "__main__":`'
)
UNKNOWN_EXIT = -255
"""The return code of a process that ended without its exit hook and is no child of this one."""


def from_returncode(rank: int, returncode: int, when: float, functions: bool = False) -> RankExit:
    """Return the failure for a process's return code (negative: minus the signal, as in subprocess).

    `functions`: whether the ranks run a function by spawn, fork or forkserver.
    """
    if returncode == UNKNOWN_EXIT:
        return RankExit(when, "killed by a signal, or ended by os._exit", rank=rank)
    if functions and returncode == IMPORT_EXIT:
        return RankExit(when, CALLED_IN_IMPORT, rank=rank)
    if returncode >= 0:
        return RankExit(when, f"exit code {returncode}", code=returncode, rank=rank)
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    cause = f" ({_SIGNAL_CAUSES[name]})" if name in _SIGNAL_CAUSES else ""
    return RankExit(when, f"killed by {name}{cause}", code=128 - returncode, rank=rank)


def exit_reason(status: Any) -> tuple[int, str]:
    """Return the exit code and its text for an argument of `sys.exit`; any other type than int means 1.

    The kernel keeps the last 8 bits of a code: 256 (a count of errors) would end a failed job with 0.
    """
    if status is None or isinstance(status, int):
        code = int(status or 0)
        return code if code & 0xFF else int(code != 0), f"exit code {code}"
    return 1, f"exit code 1 ({message_of(status).strip().partition(chr(10))[0]})"
