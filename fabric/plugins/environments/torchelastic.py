"""Ranks that torchrun (torch.distributed.elastic) started. Reads its variables; reuses its store."""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING

from fabric.core.errors import LaunchError
from fabric.launch.stores import part_of_store
from fabric.plugins.environments.rendezvous import ARRIVED, absent
from fabric.plugins.environments.started import ExternalEnvironment

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

_HELLO, _WELCOME = "fabric/hello", "fabric/welcome"
_LOOK_S = 0.02


class TorchElasticEnvironment(ExternalEnvironment):
    """Processes started by `torchrun` or `python -m torch.distributed.run`."""

    launcher = "torchrun"
    variables = {
        "rank": ("RANK",),
        "size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_size": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK", 0),
        "nodes": ("GROUP_WORLD_SIZE",),
    }
    marks = ("TORCHELASTIC_RUN_ID", "RANK")
    remedy = "start torchrun with --nnodes {nodes} --nproc-per-node {devices}"

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """The agent's own store, in a part that is new for this attempt: no second port, restarts stay apart.

        All ranks call this, and rank zero waits for the others.

        Raises:
            LaunchError: The agent cannot be reached in time, or some ranks did not come.
        """
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = part_of_store(self.main_address, self.main_port, hosts, timeout)
        return fresh_part(store, rank, world_size, timeout)


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
                raise LaunchError(absent(part, rank, world_size, timeout, here=True))
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
    while part.add(ARRIVED, 0) < world_size - 1:
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
