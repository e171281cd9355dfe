"""The variables that tell a rank its place, for processes that launchers start. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabric.processes.cores import usable_cores

if TYPE_CHECKING:
    from collections.abc import Mapping


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
