"""The place of this process among all processes. Made once per process, read everywhere."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of this process: its ranks, the sizes of world and node, and its device."""

    rank: int = 0
    """Among the ranks of the strategy: those of its process group, or all."""
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    num_nodes: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable
    job: tuple[int, int] | None = None
    """(rank, world size) in the job; None: the same, since the strategy has all ranks."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the first rank of the strategy: of the whole job, or of its group."""
        return self.rank == 0

    @property
    def job_rank(self) -> int:
        """The rank of this process among all."""
        return self.rank if self.job is None else self.job[0]

    @property
    def job_size(self) -> int:
        """The number of processes of the job."""
        return self.world_size if self.job is None else self.job[1]
