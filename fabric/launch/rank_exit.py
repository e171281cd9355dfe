"""Reports of the exit of a rank: the text of an exception, and whether it is a secondary failure.

A secondary failure reads as if another rank had ended before. Loaded at an exit. Imports no torch.
"""

from __future__ import annotations

import os
import re
import traceback
from typing import TYPE_CHECKING, NamedTuple

from fabric.core.errors import CollectiveMismatch, RankError
from fabric.core.source import is_users, line_name

if TYPE_CHECKING:
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
    own = [frame for frame in frames if is_users(frame[0])]
    text = f"{text} ({line_name(*own[-1])}{where})" if own else f"{text}{where}"
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
