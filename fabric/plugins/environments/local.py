"""This machine, or several started by hand: ranks that `python train.py`, spawn/fork or `fabric run` started.

Knows its place from the variables that our own launchers set. Never sets them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fabric.core.errors import ConfigurationError
from fabric.plugins.environments.cluster_environment import ClusterEnvironment, whole_number

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

LAUNCHED = "FABRIC_LAUNCHED"
"""Set in ranks that we started: "script", "cli", or "function", whose store the launching process hosts."""
STORE_FD = "FABRIC_STORE_FD"
"""Set in rank zero of a script: the file descriptor of a socket that already listens."""


class LocalEnvironment(ClusterEnvironment):
    """Processes on this machine, started by us, or on several with `fabric run --num-nodes`."""

    def __init__(self) -> None:
        self._set: dict[str, int] = {}

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process is one of the ranks already, so that nothing is left to start."""
        return LAUNCHED in os.environ or "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, else this machine."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """MASTER_PORT; 0 where it is not set: the kernel will choose one."""
        return whole_number("MASTER_PORT") or 0

    @staticmethod
    def detect() -> bool:
        """Always: this is what remains when no cluster is found."""
        return True

    def world_size(self) -> int:
        """Number of processes of the job."""
        return self._read("WORLD_SIZE", 1)

    def set_world_size(self, size: int) -> None:
        """Take `size` as the number of processes of the job."""
        self._set["WORLD_SIZE"] = size

    def global_rank(self) -> int:
        """Index of this process in the job."""
        return self._read("RANK", 0)

    def set_global_rank(self, rank: int) -> None:
        """Take `rank` as the index of this process in the job."""
        self._set["RANK"] = rank

    def local_rank(self) -> int:
        """Index of this process on its machine."""
        return self._read("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        """Index of this machine: NODE_RANK or GROUP_RANK."""
        return self._read("NODE_RANK", whole_number("GROUP_RANK") or 0)

    def local_world_size(self) -> int | None:
        """Number of processes on this machine, once launched."""
        return self._read("LOCAL_WORLD_SIZE", 0) or None

    def num_nodes(self) -> int | None:
        """Number of machines, once launched."""
        local = self.local_world_size()
        return self.world_size() // local if local else None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare what our launchers started, or what SLURM would start, with what the script asks for.

        Raises:
            ConfigurationError: The numbers of processes differ, or nobody starts those of other machines.
        """
        started = whole_number("WORLD_SIZE")
        asked = num_devices * num_nodes
        if LAUNCHED in os.environ and started is not None and started != asked:
            raise ConfigurationError(
                f"devices={num_devices} x num_nodes={num_nodes} asks for {asked} processes, but the launcher "
                f'started WORLD_SIZE={started}. Write devices="auto" in the script, or start it with '
                f"`fabric run --devices {num_devices} --num-nodes {num_nodes}`."
            )
        if not self.creates_processes_externally and "SLURM_JOB_ID" in os.environ:
            from fabric.plugins.environments.slurm import check_allocation

            check_allocation(num_devices, num_nodes)

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """The store of rank zero, or of the process that launched functions (raises as the base does)."""
        from fabric.launch.stores import part_of_store

        if world_size == 1:  # nobody else comes
            from torch.distributed import HashStore

            return HashStore()
        hosts = rank == 0 and os.environ.get(LAUNCHED) != "function"
        handed = whole_number(STORE_FD) if hosts else None
        if handed is not None:
            os.set_inheritable(handed, False)  # children of this rank must not keep the port
            del os.environ[STORE_FD]  # used once
        return part_of_store(self.main_address, self.main_port, hosts, timeout, handed)

    def _read(self, name: str, default: int) -> int:
        if name in self._set:
            return self._set[name]
        value = whole_number(name) if self.creates_processes_externally or name == "NODE_RANK" else None
        return default if value is None else value


LightningEnvironment = LocalEnvironment
"""Lightning's name for it."""
