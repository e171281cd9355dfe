"""Calls that only rank zero makes: the decorator, and logging, warnings and deprecations through it.

Used all over the package and by user code. Never asks torch.distributed: launch or env sets the rank.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)

# Each may be stale or local on its own (SLURM_PROCID=0 in an interactive allocation, LOCAL_RANK per node), so
# a process is rank zero only where all of them say so.
_RANK_VARIABLES = ("SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")


class LightningDeprecationWarning(DeprecationWarning):
    """Something of the public surface will be removed."""


class _RankZeroOnly:
    """The decorator `@rank_zero_only`: on other ranks the function returns None at once, or `default` of
    `rank_zero_only(function, default=...)`.

    `rank_zero_only.rank` is the global rank of this process.
    """

    def __init__(self) -> None:
        self._rank: int | None = None

    @property
    def rank(self) -> int:
        """The global rank: what the launch set, else what the environment says, else 0. None forgets it."""
        return _rank_from_environment() if self._rank is None else self._rank

    @rank.setter
    def rank(self, value: int | None) -> None:
        self._rank = value

    @overload
    def __call__(self, fn: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def __call__(self, fn: Callable[P, T], default: R) -> Callable[P, T | R]: ...
    def __call__(self, fn: Callable[P, T], default: Any = None) -> Callable[P, Any]:
        """`fn` as a function that returns `default` at once on every rank but zero."""

        @functools.wraps(fn)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> Any:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero

    def __reduce__(self) -> str:
        return "rank_zero_only"  # one per process: a pickled function must see the rank of where it runs


def _rank_from_environment() -> int:
    rank = os.environ.get("RANK", "")
    if rank.isdigit():
        return int(rank)
    found = [os.environ.get(name, "") for name in _RANK_VARIABLES]
    return next((int(value) for value in found if value.isdigit() and int(value) > 0), 0)


rank_zero_only = _RankZeroOnly()


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """`message` after "[rank: 3] "; as it is if `rank` is None."""
    return message if rank is None else f"[rank: {rank}] {message}"


# What a stack level means (4, or 5 for deprecations, is the caller) is part of the compatible surface, where
# three or four frames lay between; here there is one.
def rank_zero_debug(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log at level DEBUG on rank zero; arguments as for `logging.Logger.debug`.

    `stacklevel`: 4 is the caller.
    """
    if rank_zero_only.rank == 0:
        _log.debug(*args, stacklevel=max(stacklevel - 2, 1), **kwargs)


def rank_zero_info(*args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log at level INFO on rank zero; arguments as for `logging.Logger.info`.

    `stacklevel`: 4 is the caller.
    """
    if rank_zero_only.rank == 0:
        _log.info(*args, stacklevel=max(stacklevel - 2, 1), **kwargs)


def rank_zero_warn(message: str | Warning, stacklevel: int = 4, **kwargs: Any) -> None:
    """Warn with `message` on rank zero, as from the caller's line. `category=` and others go to
    `warnings.warn`.

    `stacklevel`: 4 is the caller, 5 whoever called it.
    """
    if rank_zero_only.rank == 0:
        warnings.warn(message, stacklevel=max(stacklevel - 2, 1), **kwargs)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn with `message` on rank zero that something will be removed (category
    `LightningDeprecationWarning`).

    `stacklevel`: 5 is the caller.
    """
    kwargs.setdefault("category", LightningDeprecationWarning)
    if rank_zero_only.rank == 0:
        warnings.warn(message, stacklevel=max(stacklevel - 3, 1), **kwargs)
