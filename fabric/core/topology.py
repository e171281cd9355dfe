"""`Topology`: ranks, sizes and device of this process. Created once per process."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks of this process, sizes of world and node, and the device."""

    rank: int = 0
    """The rank in the strategy's process group, or in the job."""
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    num_nodes: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable
    job: tuple[int, int] | None = None
    """(rank, world size) in the job, if the strategy has a process group of fewer ranks; else None."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the first rank of the job, or of the strategy's process group."""
        return self.rank == 0

    @property
    def job_rank(self) -> int:
        """The rank of this process in the job."""
        return self.rank if self.job is None else self.job[0]

    @property
    def job_size(self) -> int:
        """The number of processes of the job."""
        return self.world_size if self.job is None else self.job[1]
