"""How the others learn what became of the rank that goes first (a download before anyone reads it)."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from fabric.core.errors import RankError

if TYPE_CHECKING:
    from fabric.strategies.strategy import Strategy


def first_failure(strategy: Strategy, local: bool, error: BaseException | None) -> BaseException | None:
    """The error of the rank that went first, of this machine or else of another; None: all went well.

    All ranks must call this.

    Args:
        strategy: Carries the news.
        local: The first rank of each machine counts, not that of the job.
        error: On a first rank: its own outcome. Ignored elsewhere.
    """
    here = strategy.topology
    sources = range(0, here.world_size, here.local_world_size) if local else range(1)
    mine = here.rank - here.local_rank if local else 0
    # Every rank takes part in every machine's news: a broadcast is a call of all ranks.
    news = {source: strategy.broadcast(_portable(error, source), source) for source in sources}
    failures = [news[mine], *news.values()]
    return next((failure for failure in failures if failure is not None), None)


def _portable(error: BaseException | None, rank: int) -> BaseException | None:
    """The error as other ranks raise it: the same one where it pickles, else a RankError that quotes it."""
    if error is None:
        return None
    try:
        same: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        same = RankError(f"rank {rank} failed first: {type(error).__name__}: {error}")
    if hasattr(same, "add_note"):  # Python 3.11
        same.add_note(f"raised by rank {rank} in fabric.rank_zero_first()")
    return same
