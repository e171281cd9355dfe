"""`rendezvous`: returns the store of the job once every rank has reached it. Strategies call it at start."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from fabric.core.errors import LaunchError
from fabric.core.job_secret import pop_inherited_secret
from fabric.core.messages import name_ranks, print_line
from fabric.launch.parent_death import LAUNCHED, attach_to_supervisor, mark_rank
from fabric.launch.system import require_posix

if TYPE_CHECKING:
    from torch.distributed import Store

    from fabric.plugins.environments.cluster_environment import ClusterEnvironment

ARRIVED = "fabric/arrived"
_NOTICE_AFTER = timedelta(seconds=30)
"""Time after which rank zero prints the missing ranks; it continues to wait."""


def rendezvous(environment: ClusterEnvironment, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store of the job after all ranks have reached it. All ranks must call this.

    Args:
        environment: The environment of this process.
        rank: Global rank of this process.
        world_size: Number of processes of the job.
        timeout: Limit for the wait for the last rank. It does not limit later collectives.

    Raises:
        LaunchError: This is Windows, the store cannot be opened, or some ranks did not arrive; the message
            names them.
    """
    require_posix()
    attach_to_supervisor()
    pop_inherited_secret()
    store = environment.make_store(rank, world_size, timeout)
    await_ranks(store, rank, world_size, timeout)
    mark_rank()
    return store


def await_ranks(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Return once all ranks have called this with an unused `store` (raises like `rendezvous`)."""
    from torch.distributed import DistError

    try:
        store.set(f"{ARRIVED}/{rank}", "1")
        # A counter, not a wait on every key: the host answers each rank once, whatever the world size.
        if store.add(ARRIVED, 1) == world_size:
            store.set(f"{ARRIVED}/all", "1")
        if rank == 0 and timeout > _NOTICE_AFTER:
            with suppress(DistError):
                store.wait([f"{ARRIVED}/all"], _NOTICE_AFTER)
            if not store.check([f"{ARRIVED}/all"]):
                print_line(missing_ranks_text(store, rank, world_size, _NOTICE_AFTER))
        store.wait([f"{ARRIVED}/all"], timeout)
    except (DistError, RuntimeError) as error:
        raise LaunchError(missing_ranks_text(store, rank, world_size, timeout)) from error


def missing_ranks_text(
    store: Store, rank: int, world_size: int, timeout: timedelta, self_arrived: bool = False
) -> str:
    """Return the error text for ranks that did not arrive.

    `self_arrived`: this rank did arrive, but has not written that to the store.
    """
    seconds = f"{timeout.total_seconds():g} s"
    try:
        others = [other for other in range(world_size) if not (self_arrived and other == rank)]
        missing = [other for other in others if not store.check([f"{ARRIVED}/{other}"])]
    except RuntimeError:
        missing = []
    if not missing:
        return (
            f"Rank {rank} lost rank zero's store while it waited for the other ranks. Look at the output of "
            "rank zero for the cause."
        )
    stale = ""
    if rank == 0 and os.environ.keys().isdisjoint((LAUNCHED, "TORCHELASTIC_RUN_ID")):
        # With one of these variables Fabric assumes that a launcher has started all ranks.
        left = [f"{name}={os.environ[name]}" for name in ("RANK", "LOCAL_RANK") if name in os.environ]
        if left:
            stale = f" The environment has {', '.join(left)}. Unset what no launcher has set."
    return (
        f"{world_size - len(missing)} of {world_size} ranks arrived within {seconds}; missing: "
        f"{name_ranks(missing)}. Look at the output of the missing ones; if they "
        "only start slowly, give the strategy startup_timeout=timedelta(minutes=...)." + stale
    )
