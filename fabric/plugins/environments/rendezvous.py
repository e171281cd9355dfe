"""All ranks meet: the store of the job, once every rank has reached it. Strategies call it at start."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from fabric.core.errors import LaunchError
from fabric.processes.system import require_posix

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

    from fabric.plugins.environments.cluster_environment import ClusterEnvironment

_ALL = "fabric/arrived"
_HELLO, _WELCOME = "fabric/hello", "fabric/welcome"
_LOOK_S = 0.02


def rendezvous(environment: ClusterEnvironment, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store of the job, after all ranks have reached it. All ranks must call this.

    Args:
        environment: Where this process stands.
        rank: Global rank of this process.
        world_size: Number of processes of the job.
        timeout: How long to wait for the last rank. It does not limit later collectives.

    Raises:
        LaunchError: This is Windows, the store cannot be opened, or some ranks did not arrive; the message
            names them.
    """
    require_posix()
    store = environment.make_store(rank, world_size, timeout)
    await_ranks(store, rank, world_size, timeout)
    return store


def await_ranks(store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Return once all ranks have called this on a fresh `store` (raises like `rendezvous`)."""
    from torch.distributed import DistError

    try:
        store.set(f"{_ALL}/{rank}", "1")
        # A counter, not a wait on every key: the host answers each rank once, whatever the world size.
        if store.add(_ALL, 1) == world_size:
            store.set(f"{_ALL}/all", "1")
        store.wait([f"{_ALL}/all"], timeout)
    except (DistError, RuntimeError) as error:
        raise LaunchError(_absent(store, rank, world_size, timeout)) from error


def fresh_part(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """A part of a store that outlives its ranks, in which no earlier ranks have written. All ranks.

    Nothing that ranks are given tells their attempt from the one before: torchrun's agents need not agree on
    the number of restarts. So each rank says a word that nobody has said before, and rank zero, which lives
    now, answers it with the name of the part. It goes on answering until all have used the part, because
    words of earlier ranks look just like those of ranks that live.

    Raises:
        LaunchError: Some ranks did not come; on rank zero the message names them.
    """
    from torch.distributed import DistError, PrefixStore

    word = uuid.uuid4().hex
    try:
        if rank == 0:
            part = PrefixStore(f"fabric/{word}", store)
            if not _welcome(store, part, word, world_size, timeout):
                raise LaunchError(_absent(part, rank, world_size, timeout, here=True))
            return part
        store.append(_HELLO, f"{word} ")  # type: ignore[attr-defined]
        store.wait([f"{_WELCOME}/{word}"], timeout)
        return PrefixStore(f"fabric/{store.get(f'{_WELCOME}/{word}').decode()}", store)
    except DistError as error:
        raise LaunchError(
            f"Rank {rank} found no rank zero within {timeout.total_seconds():g} s. Look at rank 0's output; "
            "if it only starts slowly, give it time: DDPStrategy(startup_timeout=timedelta(minutes=...))."
        ) from error


def _welcome(store: Store, part: Store, name: str, world_size: int, timeout: timedelta) -> bool:
    """Answer all words until every other rank has arrived in the part; False: not all did in time."""
    deadline, answered = time.monotonic() + timeout.total_seconds(), set[str]()
    while part.add(_ALL, 0) < world_size - 1:
        if time.monotonic() > deadline:
            return False
        words = store.get(_HELLO).decode().split() if store.check([_HELLO]) else []
        for word in words:
            if word not in answered:
                store.set(f"{_WELCOME}/{word}", name)
        fresh = len(words) > len(answered)
        answered.update(words)
        if not fresh:
            time.sleep(_LOOK_S)
    for key in (_HELLO, *[f"{_WELCOME}/{word}" for word in answered]):
        store.delete_key(key)
    return True


def _absent(store: Store, rank: int, world_size: int, timeout: timedelta, here: bool = False) -> str:
    """The error for ranks that did not arrive; `here`: this one did, and has not said so in the store."""
    seconds = f"{timeout.total_seconds():g} s"
    try:
        others = [other for other in range(world_size) if not (here and other == rank)]
        missing = [other for other in others if not store.check([f"{_ALL}/{other}"])]
    except RuntimeError:
        missing = []
    if not missing:
        return f"Rank {rank} lost rank zero's store while it waited for the others; its output says why."
    names = ", ".join(str(other) for other in missing[:16]) + (", ..." if len(missing) > 16 else "")
    return (
        f"{world_size - len(missing)} of {world_size} ranks arrived within {seconds}; missing: "
        f"rank{'s' if len(missing) > 1 else ''} {names}. Look at the output of the missing ones; if they "
        "only start slowly, give them time: DDPStrategy(startup_timeout=timedelta(minutes=...))."
    )
