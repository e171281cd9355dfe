"""Which rank failed first, and how to say so. Imports no torch: `fabric run` uses it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

# How a rank fails because another one is gone: gloo, NCCL and the TCPStore, as their messages read.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|pair closure|remote process exited"
    r"|recv(value)?.*failed|failed to recv|socket (was )?closed|lost rank zero's store|ncclRemoteError"
    r"|DistNetworkError|NCCL communicator was abort",
    re.IGNORECASE,
)
SETTLE_S = 1.0
"""Seconds to look for the cause when the first failure seen reads like a consequence of another."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one rank that should not have ended so."""

    rank: int
    when: float
    """Seconds of the machine's monotonic clock, the same in all processes."""
    reason: str
    """"ValueError: boom (train.py:31)", "exit code 3", "killed by SIGKILL"."""
    code: int = 1
    """What the whole job exits with."""

    @property
    def is_consequence(self) -> bool:
        """Whether it reads as if another rank had gone before."""
        return _CONSEQUENCE.search(self.reason) is not None

    def summary(self, others: list[int]) -> str:
        """The last line of a failed job; `others` are the ranks that had to be stopped."""
        line = f"rank {self.rank} failed first: {self.reason}"
        if not others:
            return line
        names = ", ".join(str(rank) for rank in others[:16]) + (", ..." if len(others) > 16 else "")
        return f"{line}; stopped because of it: rank{'s' if len(others) > 1 else ''} {names}"


def root_cause(failures: list[Failure]) -> Failure:
    """The failure that made the others: the earliest that does not read like a consequence."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.when))


def from_returncode(rank: int, returncode: int, when: float) -> Failure:
    """The failure behind a process's return code (negative: minus the signal, as subprocess has it)."""
    if returncode < 0:
        return Failure(rank, when, f"killed by {signal_name(-returncode)}", 128 - returncode)
    return Failure(rank, when, f"exit code {returncode}", returncode)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
