"""Messages of failed calls of `RankPool`: the root cause first, then the error of every other rank."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from fabric.core.errors import RankError
from fabric.testing.worker import Answer

if TYPE_CHECKING:
    from collections.abc import Callable


class RankFailure(RankError):
    """A call failed on some ranks. The message shows their tracebacks, the first to fail first.

    `exceptions` are by rank, the root cause first; a RankError stands for a death, or for one that does not
    pickle.
    """

    exceptions: dict[int, BaseException]
    """Rank to exception, root cause first. A RankError stands for a death, or for what cannot be pickled."""

    def __init__(self, message: str, exceptions: dict[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.exceptions = exceptions or {}


class RankTimeout(RankFailure):
    """Some ranks gave no answer in time, though none failed. The message shows where they stood.

    `ranks` are the silent ones.
    """

    ranks: tuple[int, ...]
    """The silent ranks."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


def death(pid: int | None, exit_code: int | None, when: float) -> Answer:
    """The answer that stands for a process that gave none and is gone."""
    how = f"exited with code {exit_code}"
    if exit_code is None:
        how = "closed its pipe, though it still runs"
    elif exit_code < 0:
        how = f"was killed by {signal.Signals(-exit_code).name}"
    text = f"The process (pid {pid}) {how}."
    return Answer(error=RankError(text), text=text, when=when, died=True)


def failure(name: str, answers: dict[int, Answer]) -> RankFailure:
    """The error for a call that has failed on some ranks."""
    order = _by_cause(answers)
    first = f", rank {order[0]} first" if len(order) > 1 else ""
    headline = f"{name} failed on {_ranks(order)} of {len(answers)}{first}."
    return RankFailure("\n\n".join([headline, *_reports(answers)]), _exceptions(answers))


def silence(name: str, answers: dict[int, Answer], stacks: dict[int, str], patience: str) -> RankFailure:
    """The error for a call that does not end on the ranks of `stacks`; a failure elsewhere is its cause."""
    silent, world_size = sorted(stacks), len(stacks) + len(answers)
    dumps = [f"Rank {rank} stands at:\n{stacks[rank]}" for rank in silent]
    order = _by_cause(answers)
    if not order:
        headline = f"{name} got no answer from {_ranks(silent)} of {world_size}: {patience}."
        return RankTimeout("\n\n".join([headline, *dumps]), tuple(silent))
    headline = (
        f"{name} failed on {_ranks(order)} of {world_size}; then {_ranks(silent)} did not come to an end."
    )
    return RankFailure("\n\n".join([headline, *_reports(answers), *dumps]), _exceptions(answers))


def call_name(function: Callable[..., Any]) -> str:
    """The function's name as people write it."""
    return str(getattr(function, "__qualname__", function))


def _by_cause(answers: dict[int, Answer]) -> list[int]:
    # A death comes before every exception: peers fail within milliseconds, maybe before the parent sees it.
    failed = [rank for rank, answer in answers.items() if answer.failed]
    return sorted(failed, key=lambda rank: (not answers[rank].died, answers[rank].when))


def _exceptions(answers: dict[int, Answer]) -> dict[int, BaseException]:
    errors = {rank: answers[rank].error for rank in _by_cause(answers)}
    return {rank: error for rank, error in errors.items() if error is not None}


def _reports(answers: dict[int, Answer]) -> list[str]:
    return [f"Rank {rank}:\n{answers[rank].text}" for rank in _by_cause(answers)]


def _ranks(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))}"
