"""Rank zero first (a download before any rank reads it): the other ranks wait, and get its result."""

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

    The others wait in the message that brings the outcome: however long the first rank takes, nothing times
    out while it lives. A call of all ranks in its block meets them there, in another call.

    Raises:
        CollectiveMismatch: A first rank makes a call of all ranks in its block; on all ranks.
        RankError: One has ended, or given no sign of life for as long as collectives wait.
    """
    from fabric.collectives.frames import call_of
    from fabric.collectives.objects import PickledObject, gather_pickled

    here, channel, verb = strategy.topology, strategy.channel(), f"rank_zero_first(local={local})"
    members = channel.collective.members
    nodes = [rank // here.local_world_size for rank in members]
    firsts = [nodes.index(node) for node in sorted({*nodes})] if local else [0]
    leads, error = here.rank in firsts, None
    strategy.check_barrier(verb)
    guard = channel.guard
    calls = guard.count if guard is not None else 0
    if leads:
        try:
            yield
        except BaseException as raised:
            error = raised
    if guard is not None and guard.count != calls:  # in the block: it was a mismatch, which all have raised
        if error is not None:
            raise error
        return
    call = call_of(
        verb, f"waiting until rank {', '.join([str(members[i]) for i in firsts])} leaves the block"
    )
    outcome = PickledObject(_portable(error, here.job_rank), verb)
    told = gather_pickled(call._replace(patient=True), outcome, channel)
    own = told[nodes.index(nodes[here.rank]) if local else 0]
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
