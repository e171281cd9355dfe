"""Errors of failed calls of `RankPool`: the root cause first, then the error of every other rank."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from fabric.core.errors import RankError
from fabric.core.messages import name_ranks
from fabric.testing.worker import RankResult

if TYPE_CHECKING:
    from collections.abc import Callable


class RankFailure(RankError):
    """A call failed on some ranks.

    Args:
        message: The tracebacks of these ranks, the first failure first.
        exceptions: Exceptions by rank, the root cause first. A RankError replaces an exit, or an exception
            that does not pickle.
    """

    exceptions: dict[int, BaseException]
    """Exceptions by rank, the root cause first."""

    def __init__(self, message: str, exceptions: dict[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.exceptions = exceptions or {}


class RankTimeout(RankFailure):
    """Some ranks returned no result in time, and none failed.

    Args:
        message: The stacks of these ranks.
        ranks: The ranks without a result.
    """

    ranks: tuple[int, ...]
    """Ranks without a result."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


def exit_result(pid: int | None, exit_code: int | None, when: float) -> RankResult:
    """Return the result for a process that ended without one."""
    how = f"exited with code {exit_code}"
    if exit_code is None:
        how = "closed its pipe, though it still runs"
    elif exit_code < 0:
        how = f"was killed by {signal.Signals(-exit_code).name}"
    text = f"The process (pid {pid}) {how}."
    return RankResult(error=RankError(text), text=text, when=when, died=True)


def failure(name: str, results: dict[int, RankResult]) -> RankFailure:
    """Return the error for a call that failed on some ranks."""
    order = _by_cause(results)
    first = f", rank {order[0]} first" if len(order) > 1 else ""
    headline = f"{name} failed on {name_ranks(order)} of {len(results)}{first}."
    return RankFailure("\n\n".join([headline, *_reports(results)]), _exceptions(results))


def timeout_failure(
    name: str, results: dict[int, RankResult], stacks: dict[int, str], limit: str
) -> RankFailure:
    """Return the error for a call that does not end on the ranks of `stacks`; a failed rank is its cause."""
    hanging, world_size = sorted(stacks), len(stacks) + len(results)
    dumps = [f"Stacks of rank {rank}:\n{stacks[rank]}" for rank in hanging]
    order = _by_cause(results)
    if not order:
        headline = f"{name} got no result from {name_ranks(hanging)} of {world_size}: {limit}."
        return RankTimeout("\n\n".join([headline, *dumps]), tuple(hanging))
    headline = (
        f"{name} failed on {name_ranks(order)} of {world_size}; then {name_ranks(hanging)} did not end."
    )
    return RankFailure("\n\n".join([headline, *_reports(results), *dumps]), _exceptions(results))


def call_name(function: Callable[..., Any]) -> str:
    """Return the function's name in source code."""
    return str(getattr(function, "__qualname__", function))


def _by_cause(results: dict[int, RankResult]) -> list[int]:
    # An exit precedes exceptions: peers fail within milliseconds, maybe before the parent polls the exit.
    failed = [rank for rank, result in results.items() if result.failed]
    return sorted(failed, key=lambda rank: (not results[rank].died, results[rank].when))


def _exceptions(results: dict[int, RankResult]) -> dict[int, BaseException]:
    errors = {rank: results[rank].error for rank in _by_cause(results)}
    return {rank: error for rank, error in errors.items() if error is not None}


def _reports(results: dict[int, RankResult]) -> list[str]:
    return [f"Rank {rank}:\n{results[rank].text}" for rank in _by_cause(results)]
