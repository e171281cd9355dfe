"""Which rank failed first, and how to say so. Imports no torch: `fabric run` uses it."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Any

from fabric.launch.rank_exit import RankExit

if TYPE_CHECKING:
    from collections.abc import Collection


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
    reason = f"ended well while rank {cause.rank} still needed it ({cause.reason})"
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
