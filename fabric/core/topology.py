"""Who am I: the place of this process among all processes. Made once per process, read everywhere."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of this process: its ranks, the sizes of world and node, and its device."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    num_nodes: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank zero of the whole job."""
        return self.rank == 0
