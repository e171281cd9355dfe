"""`RankEnv`: the environment variables of ranks that launchers start. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fabric.core.cores import usable_cores
from fabric.core.errors import LaunchError
from fabric.core.job_secret import VARIABLE as SECRET
from fabric.core.job_secret import new_secret
from fabric.launch.parent_death import JOINED, LAUNCHED
from fabric.launch.stores import listen

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from fabric.plugins.environments.local import LocalEnvironment


@dataclass(frozen=True, slots=True)
class RankEnv:
    """The ranks, world sizes and store address of one rank."""

    local_rank: int
    world_size: int
    local_world_size: int
    main_address: str
    main_port: int
    node_rank: int = 0
    secret: str = field(default="", repr=False)
    """The secret of the job; "": ranks agree on one through the store (see `core/job_secret.py`)."""

    @property
    def rank(self) -> int:
        """Global rank, numbered by machine, then by local rank."""
        return self.node_rank * self.local_world_size + self.local_rank

    def with_local_rank(self, local_rank: int) -> RankEnv:
        """Return the environment of another rank of this machine."""
        return replace(self, local_rank=local_rank)

    def variables(self, inherited: Mapping[str, str], launched: str) -> dict[str, str]:
        """Return the variables to set in the rank's environment, on top of the inherited ones.

        The number of OpenMP threads is the number of cores per rank, unless the user has set one.
        """
        share = {} if inherited.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(self.threads())}
        return {
            **share,
            LAUNCHED: launched,
            JOINED: "",
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "NODE_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.main_address,
            "MASTER_PORT": str(self.main_port),
            **({SECRET: self.secret} if self.secret else {}),
        }

    def threads(self) -> int:
        """Return the number of cores per rank of this machine, at least 1."""
        return max(1, usable_cores() // self.local_world_size)


def first_rank_env(
    processes: int, num_nodes: int, node_rank: int, address: str, port: int
) -> tuple[RankEnv, socket.socket | None]:
    """Return the environment of this machine's first rank; on node 0 also a listening socket for the store.

    With one machine the store is on localhost, whatever address cluster variables have.

    Raises:
        LaunchError: The port is taken.
        ConfigurationError: `port` is no port number.
    """
    address = address if num_nodes > 1 else "127.0.0.1"
    listener = None if node_rank else listen(address, port, one_interface=num_nodes > 1)
    if listener is not None:
        port = int(listener.getsockname()[1])
    # Launchers of several machines do not communicate, so each reads the secret from the environment.
    secret = new_secret(os.environ) if num_nodes == 1 else os.environ.get(SECRET, "")
    return RankEnv(0, processes * num_nodes, processes, address, port, node_rank, secret), listener


def first_rank_env_of(
    environment: LocalEnvironment, processes: int, num_nodes: int
) -> tuple[RankEnv, socket.socket | None]:
    """Return `first_rank_env` with node rank, address and port of `environment`.

    Raises:
        LaunchError: MASTER_ADDR or MASTER_PORT is missing with several machines, or the port is taken.
    """
    if num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        raise LaunchError(
            f"num_nodes={num_nodes} needs MASTER_ADDR and MASTER_PORT (of the first machine) and "
            "NODE_RANK in the environment of each machine. Set them, or use `fabric run --num-nodes "
            f"{num_nodes} --node-rank N --main-address HOST`, or torchrun."
        )
    return first_rank_env(
        processes, num_nodes, environment.node_rank(), environment.main_address, environment.main_port
    )
