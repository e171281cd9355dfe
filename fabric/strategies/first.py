"""Who goes first (a download before anyone reads it): how the others wait, and learn what became of it."""

from __future__ import annotations

import pickle
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fabric.core.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.strategies.strategy import Strategy


@contextmanager
def first_then_others(strategy: Strategy, local: bool) -> Iterator[None]:
    """The context of `Fabric.rank_zero_first`, for which see there.

    The others wait through the store, not in a collective: however long the first rank takes, nothing times
    out while it lives.

    Raises:
        CollectiveMismatch: A first rank makes a collective in its block, which the others cannot come to; on
            all ranks.
        RankError: One has ended, or given no sign of life for as long as collectives wait.
    """
    from fabric.plugins.collectives.control import Arrival
    from fabric.plugins.collectives.frames import call_of

    here, guard, verb = strategy.topology, strategy.collective.guard, f"rank_zero_first(local={local})"
    firsts = range(0, here.world_size, here.local_world_size) if local else range(1)
    leads, error = here.rank in firsts, None
    strategy.meet(verb)
    through = None  # else the news is where the others wait
    if guard is not None:
        why = "it is in the block, and gave no sign of life"
        through = Arrival(guard.waits, "first", firsts, why, patient=True)
    if leads:
        try:
            yield
        except BaseException as raised:
            error = raised
        if through is not None:
            through.tell(here.rank)
    if through is not None and guard is not None:
        what = f"waiting until rank {', '.join(map(str, firsts))} leaves the block"
        guard.wait(through, call_of(verb, what))
    told = strategy.all_gather_object(_portable(error, here.rank), label=verb)
    if through is not None and here.rank == 0:  # all ranks are past it now
        through.forget()
    own = told[here.rank - here.local_rank if local else 0]
    failure = error or next((one for one in [own, *told] if one is not None), None)
    if failure is not None:
        raise failure
    if not leads:
        yield


def _portable(error: BaseException | None, rank: int) -> BaseException | None:
    """The error as other ranks raise it: the same one where it pickles, else a RankError that quotes it."""
    if error is None:
        return None
    try:
        same: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        same = RankError(f"rank {rank} failed first: {type(error).__name__}: {error}")
    with suppress(AttributeError):  # an exception class with slots
        same.fabric_raised_by = rank  # type: ignore[attr-defined]
    if hasattr(same, "add_note"):  # Python 3.11
        same.add_note(f"raised by rank {rank} in fabric.rank_zero_first()")
    return same
