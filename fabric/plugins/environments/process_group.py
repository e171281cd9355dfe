"""`ProcessGroupEnvironment`: ranks and sizes of a process group that is initialised already."""

from __future__ import annotations

import os

import torch

from fabric.launch.parent_death import LAUNCHED
from fabric.plugins.environments.started import ExternalEnvironment


class ProcessGroupEnvironment(ExternalEnvironment):
    """The ranks of this process in torch.distributed's default group, which was initialised before Fabric.

    Local and node ranks are read from variables; without them all ranks are assumed to be on one machine.
    """

    launcher = "init_process_group"
    variables = {
        "local_rank": ("LOCAL_RANK",),
        "local_size": ("LOCAL_WORLD_SIZE",),
        "node_rank": ("NODE_RANK", "GROUP_RANK", 0),
    }
    remedy = "do not call init_process_group before Fabric"

    def __init__(self) -> None:
        super().__init__()
        if LAUNCHED in os.environ:
            self.launcher = "fabric.launch()"
            self.remedy = f"use the first Fabric: this process is rank {self.global_rank()} of its job"

    @classmethod
    def detect(cls) -> bool:
        """Whether `torch.distributed.init_process_group` has been called in this process."""
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def world_size(self) -> int:
        """Size of the default group."""
        return torch.distributed.get_world_size()

    def global_rank(self) -> int:
        """Rank in the default group."""
        return torch.distributed.get_rank()

    def local_rank(self) -> int:
        """LOCAL_RANK, else the rank."""
        return super().local_rank() if "LOCAL_RANK" in os.environ else self.global_rank()

    def local_world_size(self) -> int | None:
        """LOCAL_WORLD_SIZE, else the world size."""
        return super().local_world_size() or self.world_size()

    def _derived_port(self) -> int:
        return 0  # no rendezvous is needed
