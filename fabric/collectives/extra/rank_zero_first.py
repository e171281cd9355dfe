"""Context in which rank zero runs first (a download) while the other ranks wait for its result."""

from __future__ import annotations

import pickle
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fabric.collectives.frames import call_of
from fabric.collectives.objects import PickledObject, gather_pickled
from fabric.core.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def rank_zero_first_context(strategy: Any, local: bool) -> Iterator[None]:
    """Context of `Fabric.rank_zero_first`. All ranks must call this.

    The other ranks wait for the outcome of the first rank without a time limit while its process is alive.
    If the first rank calls a collective in its block, the calls differ, and all ranks raise.

    Raises:
        CollectiveMismatch: A first rank called a collective in its block; on all ranks.
        RankError: A first rank exited, or did not respond within the timeout of collectives.
    """
    topology, channel, verb = strategy.topology, strategy.channel(), f"rank_zero_first(local={local})"
    members = channel.collective.members
    nodes = [rank // topology.local_world_size for rank in members]
    first_ranks = [nodes.index(node) for node in sorted({*nodes})] if local else [0]
    is_first, error = topology.rank in first_ranks, None
    strategy.check_barrier(verb)
    guard = channel.guard
    calls = guard.count if guard is not None else 0
    if is_first:
        try:
            yield
        except BaseException as raised:
            error = raised
    if guard is not None and guard.count != calls:  # a collective in the block: all ranks raised a mismatch
        if error is not None:
            raise error
        return
    call = call_of(
        verb, f"waiting until rank {', '.join([str(members[i]) for i in first_ranks])} leaves the block"
    )
    outcome = PickledObject(_portable(error, topology.job_rank), verb)
    errors = gather_pickled(call._replace(patient=True), outcome, channel)
    of_node = errors[nodes.index(nodes[topology.rank]) if local else 0]
    failure = error or next((one for one in [of_node, *errors] if one is not None), None)
    if failure is not None:
        raise failure
    if not is_first:
        yield


def _portable(error: BaseException | None, rank: int) -> BaseException | None:
    """Return the error to raise on other ranks: `error` if it pickles, else a RankError that quotes it."""
    if error is None:
        return None
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RankError(f"rank {rank} failed first: {type(error).__name__}: {error}")
    with suppress(AttributeError):  # an exception class with slots
        copy.fabric_raised_by = rank  # type: ignore[attr-defined]
    if hasattr(copy, "add_note"):  # Python 3.11
        copy.add_note(f"raised by rank {rank} in fabric.rank_zero_first()")
    return copy
