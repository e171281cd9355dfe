"""Reports of the exit of a rank: the text of an exception, which rank failed first, the last line of the job.

A secondary failure reads as if another rank had ended before. Imports no torch.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import CollectiveMismatch, RankError
from fabric.core.source import format_line, is_user_code

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

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
_CALL = re.compile(r"RankError: (\w+)\S*(?: at .*)? failed on rank \d.*\(([^()]+:\d+)\)$")
_OF_RANK_ZERO = ("save", "load", "save_latest", "load_latest", "barrier")
"""Calls that loops make on one rank by mistake."""
_OF_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)")
_QUOTED = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


class RankExit(NamedTuple):
    """The exit report of a rank to the process that started it, sent as a pickled tuple by a pipe."""

    when: float
    """Of `time.monotonic()`, the same in all processes of a machine."""
    reason: str | None = None
    """"ValueError: boom (train.py:31)", "exit code 3", "killed by SIGKILL"; None: it ended well."""
    trace: str = ""
    """The traceback, where the rank does not print it."""
    code: int = 1
    """What the whole job exits with, if this is what ended it."""
    result: bytes | None = None
    rank: int = -1
    """Known to who hears it."""

    @property
    def is_secondary_failure(self) -> bool:
        """Whether it reads as if another rank had gone before."""
        return self.reason is not None and is_secondary_failure(self.reason)


def is_secondary_failure(reason: str) -> bool:
    """Whether the end of a rank reads as if another one had gone before."""
    return _CONSEQUENCE.search(reason) is not None


def describe(error: BaseException, tb: TracebackType | None = None) -> str:
    """`ValueError: boom (train.py:31)`: type, first line of the message (two, if it ends in a colon), and the
    user's line that raised.
    """
    lines = str(error).strip().splitlines() or [""]
    if lines[0].endswith(":"):
        lines[:2] = [" ".join(map(str.strip, lines[:2]))]
    frames = [
        (frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(tb or error.__traceback__)
    ]
    text, where = (f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__), ""
    if worker := _OF_WORKER.match(lines[0]):  # torch quotes the traceback of a loader's worker
        text, where = lines[-1], f", in {worker[1]}"
        frames += [(file, int(number)) for file, number in _QUOTED.findall(str(error))]
    if isinstance(error, ValueError | RuntimeError):
        from fabric.core.advice import torch_advice

        text += torch_advice(text)
    own = [frame for frame in frames if is_user_code(frame[0])]
    text = f"{text} ({format_line(*own[-1])}{where})" if own else f"{text}{where}"
    rank = getattr(error, "fabric_raised_by", None)
    return text if rank is None else f"{text}, raised by rank {rank}"


def deferred_traceback(error: BaseException, reason: str, tb: TracebackType | None) -> str:
    """The traceback, if another rank has more to say, or says the same; "" if this one should print it."""
    rank = int(os.environ.get("RANK", "0"))
    alike = isinstance(error, CollectiveMismatch | RankError | KeyboardInterrupt)
    if not is_secondary_failure(reason) and not (alike and rank != 0):
        return ""
    text = "".join(traceback.format_exception(type(error), error, tb))[-_LONGEST_TRACE:]
    return "".join([f"[rank{rank}]: {line}\n" for line in text.splitlines()])


def summary(
    cause: RankExit,
    stopped: Collection[int] = (),
    failures: Collection[RankExit] = (),
    elsewhere: bool = False,
) -> str:
    """The last line of a failed job.

    Args:
        cause: Of all of it.
        stopped: The ranks of this machine that were stopped because of it.
        failures: All that failed; those that read like consequences are as good as stopped.
        elsewhere: Whether there are ranks on other machines.
    """
    how = "lost a rank of another machine" if cause.is_secondary_failure and elsewhere else "failed first"
    line = f"rank {cause.rank} on {socket.gethostname()} {how}: {cause.reason}"
    echoes = {failure.rank for failure in failures if failure.is_secondary_failure}
    followers = {*stopped, *echoes} - {cause.rank}
    others = {failure.rank for failure in failures} - followers - {cause.rank}
    if others:
        line += f"; {_ranks(others)} failed, too"
    return f"{line}; {_ranks(followers)} stopped because of it" if followers else line


def _ranks(ranks: Collection[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def root_cause(failures: Collection[RankExit], finished: Collection[int] = ()) -> RankExit:
    """The failure that made the others: the earliest that does not read like a consequence.

    Args:
        failures: At least one.
        finished: Ranks that have ended well. If there are only consequences, one of these left too early.
    """
    cause = min(
        failures, key=lambda failure: (failure.is_secondary_failure, bool(failure.trace), failure.when)
    )
    if not cause.is_secondary_failure or not finished:
        return cause
    told = _CALL.match(cause.reason or "")
    waits = f"waits in fabric.{told[1]} ({told[2]})" if told else f"still needed it ({cause.reason})"
    reason = f"finished (exit 0) while rank {cause.rank} {waits}"
    if told and told[1] in _OF_RANK_ZERO:
        reason += ": is the call inside `if fabric.is_global_zero`?"
    return cause._replace(rank=min(finished), reason=reason)


LOST = -255
"""Instead of a return code: a process ended without an exit hook, and only its parent knows the code."""


def from_returncode(rank: int, returncode: int, when: float) -> RankExit:
    """The failure behind a process's return code (negative: minus the signal, as subprocess has it)."""
    if returncode == LOST:
        return RankExit(when, "killed by a signal, or ended by os._exit", rank=rank)
    if returncode >= 0:
        return RankExit(when, f"exit code {returncode}", code=returncode, rank=rank)
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return RankExit(when, f"killed by {name}", code=128 - returncode, rank=rank)


def exit_reason(status: Any) -> tuple[int, str]:
    """The code and the words for what `sys.exit` was given: a number is the code, anything else means 1."""
    if status is None or isinstance(status, int):
        return int(status or 0), f"exit code {int(status or 0)}"
    return 1, f"exit code 1 ({str(status).strip().partition(chr(10))[0]})"
