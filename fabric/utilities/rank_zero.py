"""`rank_zero_only`, and logging, warnings and deprecations on rank zero only.

Does not use torch.distributed: the launch or environment variables set the rank.
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from fabric.core.source import library_frames

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)

# Each may be stale or local (SLURM_PROCID=0 in an interactive allocation, LOCAL_RANK per node), so a process
# is rank zero only if none of them is above 0.
_RANK_VARIABLES = ("SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")


class LightningDeprecationWarning(DeprecationWarning):
    """A public name will be removed."""


class _RankZeroOnly:
    """The decorator `@rank_zero_only`: on other ranks the function returns None without running, or `default`
    of `rank_zero_only(function, default=...)`.

    `rank_zero_only.rank` is the global rank of this process.
    """

    def __init__(self) -> None:
        self._rank: int | None = None
        self.warning_rank = 0
        """The rank that warns: the first one of the strategy's process group."""

    @property
    def rank(self) -> int:
        """The global rank: set by the launch, else from environment variables, else 0. Set None to reset."""
        return _rank_from_environment() if self._rank is None else self._rank

    @rank.setter
    def rank(self, value: int | None) -> None:
        self._rank = value

    @overload
    def __call__(self, fn: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def __call__(self, fn: Callable[P, T], default: R) -> Callable[P, T | R]: ...
    def __call__(self, fn: Callable[P, T], default: Any = None) -> Callable[P, Any]:
        """Return a function that runs `fn` on rank zero, and returns `default` on all other ranks."""

        @functools.wraps(fn)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> Any:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero

    def __reduce__(self) -> str:
        return "rank_zero_only"  # a pickled function must use the rank of the process that unpickles it


def _rank_from_environment() -> int:
    rank = os.environ.get("RANK", "")
    if rank.isdigit():
        return int(rank)
    found = [os.environ.get(name, "") for name in _RANK_VARIABLES]
    return next((int(value) for value in found if value.isdigit() and int(value) > 0), 0)


rank_zero_only = _RankZeroOnly()


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return `message` with the prefix "[rank: 3] "; without one if `rank` is None."""
    return message if rank is None else f"[rank: {rank}] {message}"


# Stack levels are those of Lightning Fabric (4, or 5 for deprecations, is the caller), which has three or
# four frames in between; here there is one.
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
    """Warn with `message` on rank zero, at the caller's line. `kwargs` (`category`) are for `warnings.warn`.

    Under a strategy with `process_group=` the first rank of the group warns.

    `stacklevel`: 4 is the caller, or if that is this package, the innermost line outside of it; 5 the
    caller's caller.
    """
    if rank_zero_only.rank == rank_zero_only.warning_rank:
        level = library_frames() + 1 if stacklevel == 4 else max(stacklevel - 2, 1)
        warnings.warn(message, stacklevel=level, **kwargs)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 5, **kwargs: Any) -> None:
    """Warn with `message` on rank zero that a name will be removed (`LightningDeprecationWarning`).

    `stacklevel`: 5 is the caller. `kwargs` are for `warnings.warn` (`category=`).
    """
    kwargs.setdefault("category", LightningDeprecationWarning)
    if rank_zero_only.rank == 0:
        warnings.warn(message, stacklevel=max(stacklevel - 3, 1), **kwargs)
