"""`TorchElasticEnvironment`: ranks that torchrun started. Reads its variables; reuses its store."""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING

from fabric.core.errors import LaunchError
from fabric.launch.stores import prefix_store
from fabric.plugins.environments.rendezvous import ARRIVED, missing_ranks_text
from fabric.plugins.environments.started import ExternalEnvironment

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

_REQUESTS, _ANSWERS = "fabric/hello", "fabric/welcome"
_POLL_INTERVAL_S = 0.02


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
    marker_variables = ("TORCHELASTIC_RUN_ID", "RANK")
    remedy = "start torchrun with --nnodes {nodes} --nproc-per-node {devices}"

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Return the agent's store with a prefix that is new for this attempt; needs no second port.

        All ranks must call this; rank zero waits for the others. Arguments as for
        `ClusterEnvironment.make_store`.

        Raises:
            LaunchError: The agent cannot be reached in time, or some ranks did not arrive.
        """
        is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = prefix_store(self.main_address, self.main_port, is_host, timeout, world_size=world_size)
        return attempt_store(store, rank, world_size, timeout)


def attempt_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a store with an unused prefix, within a store that outlives its ranks. All ranks must call this.

    No variable distinguishes this attempt from earlier ones: torchrun's agents may have different numbers of
    restarts. So each rank writes a new random token, and the current rank zero answers it with the prefix. It
    answers until all ranks have used the prefix, because tokens of earlier attempts look the same.

    Raises:
        LaunchError: Some ranks did not arrive; on rank zero the message names them.
    """
    from torch.distributed import DistError, PrefixStore

    token = uuid.uuid4().hex
    try:
        if rank == 0:
            part = PrefixStore(f"fabric/{token}", store)
            if not _answer_tokens(store, part, token, world_size, timeout):
                raise LaunchError(missing_ranks_text(part, rank, world_size, timeout, self_arrived=True))
            return part
        store.append(_REQUESTS, f"{token} ")  # type: ignore[attr-defined]
        store.wait([f"{_ANSWERS}/{token}"], timeout)
        return PrefixStore(f"fabric/{store.get(f'{_ANSWERS}/{token}').decode()}", store)
    except DistError as error:
        raise LaunchError(
            f"Rank {rank} found no rank zero within {timeout.total_seconds():g} s. Look at rank 0's output; "
            "if it only starts slowly, give the strategy startup_timeout=timedelta(minutes=...)."
        ) from error


def _answer_tokens(store: Store, part: Store, name: str, world_size: int, timeout: timedelta) -> bool:
    """Answer all tokens until every other rank has used the prefix; return False after the timeout."""
    deadline, answered = time.monotonic() + timeout.total_seconds(), set[str]()
    while part.add(ARRIVED, 0) < world_size - 1:
        if time.monotonic() > deadline:
            return False
        tokens = store.get(_REQUESTS).decode().split() if store.check([_REQUESTS]) else []
        for token in tokens:
            if token not in answered:
                store.set(f"{_ANSWERS}/{token}", name)
        has_new = len(tokens) > len(answered)
        answered.update(tokens)
        if not has_new:
            time.sleep(_POLL_INTERVAL_S)
    for key in (_REQUESTS, *[f"{_ANSWERS}/{token}" for token in answered]):
        store.delete_key(key)
    return True
