"""The variables that tell a rank its place, for processes that launchers start. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabric.core.errors import LaunchError
from fabric.processes.cores import usable_cores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabric.plugins.environments.local import LocalEnvironment


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one rank, and where rank zero listens: the arguments of `LocalEnvironment.become`."""

    local_rank: int
    world_size: int
    local_world_size: int
    main_address: str
    main_port: int
    node_rank: int = 0

    @property
    def rank(self) -> int:
        """Global rank: machines one after the other."""
        return self.node_rank * self.local_world_size + self.local_rank

    @classmethod
    def first(cls, environment: LocalEnvironment, processes: int, num_nodes: int) -> Place:
        """The place of this machine's first rank; on the first machine the port of the store is taken.

        Raises:
            LaunchError: MASTER_ADDR or MASTER_PORT is missing where several machines meet, or it is taken.
        """
        if num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
            raise LaunchError(
                f"num_nodes={num_nodes} needs MASTER_ADDR and MASTER_PORT (of the first machine) and "
                "NODE_RANK in the environment of each machine. Set them, or use `fabric run --num-nodes "
                f"{num_nodes} --node-rank N --main-address HOST`, or torchrun."
            )
        node_rank = environment.node_rank()
        port = environment.main_port if node_rank else environment.take_port(num_nodes)
        return cls(0, processes * num_nodes, processes, environment.main_address, port, node_rank)

    def at(self, local_rank: int) -> Place:
        """The same machine's place of another rank."""
        return replace(self, local_rank=local_rank)

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What to set in the rank's environment, on top of what it inherits.

        The number of OpenMP threads is a fair share of the cores, unless the user has chosen one.
        """
        share = {} if inherited.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(self.threads())}
        return {
            **share,
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "NODE_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.main_address,
            "MASTER_PORT": str(self.main_port),
        }

    def threads(self) -> int:
        """Cores per rank of this machine, at least 1."""
        return max(1, usable_cores() // self.local_world_size)
