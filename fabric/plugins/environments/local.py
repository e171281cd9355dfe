"""`LocalEnvironment`: ranks started by Fabric's launchers (`python train.py`, spawn/fork, `fabric run`).

Reads the variables that these launchers set, and never sets them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fabric.core.errors import ConfigurationError
from fabric.core.slices import use_slice
from fabric.launch.parent_death import LAUNCHED
from fabric.plugins.environments.cluster_environment import ClusterEnvironment, int_variable

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

STORE_FD = "FABRIC_STORE_FD"
"""Set in rank zero of a command line: the file descriptor of a listening socket."""


class LocalEnvironment(ClusterEnvironment):
    """Processes that Fabric started on this machine, or on several with `fabric run --num-nodes`."""

    def __init__(self) -> None:
        self._overrides: dict[str, int] = {}

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process is a rank already, so that no process needs to be started."""
        return LAUNCHED in os.environ or "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, else this machine."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """MASTER_PORT; 0 if it is not set: the kernel chooses one."""
        return int_variable("MASTER_PORT") or 0

    @staticmethod
    def detect() -> bool:
        """Always: this is the default if no cluster is detected."""
        return True

    def world_size(self) -> int:
        """Number of processes of the job."""
        return self._read("WORLD_SIZE", 1)

    def set_world_size(self, size: int) -> None:
        """Set the number of processes of the job to `size`."""
        self._overrides["WORLD_SIZE"] = size

    def global_rank(self) -> int:
        """Index of this process in the job."""
        return self._read("RANK", 0)

    def set_global_rank(self, rank: int) -> None:
        """Set the index of this process in the job to `rank`."""
        self._overrides["RANK"] = rank

    def local_rank(self) -> int:
        """Index of this process on its machine."""
        return self._read("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        """Index of this machine: NODE_RANK or GROUP_RANK."""
        return self._read("NODE_RANK", int_variable("GROUP_RANK") or 0)

    def local_world_size(self) -> int | None:
        """Number of processes on this machine, once launched."""
        return self._read("LOCAL_WORLD_SIZE", 0) or None

    def num_nodes(self) -> int | None:
        """Number of machines, once launched."""
        local = self.local_world_size()
        return self.world_size() // local if local else None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the processes of Fabric's launchers, or of a SLURM job, with the arguments of `Fabric`.

        Arguments as for `ClusterEnvironment.validate_settings`.

        Raises:
            ConfigurationError: The numbers of processes differ, or those of other machines are not started.
        """
        started = int_variable("WORLD_SIZE")
        requested = num_devices * num_nodes
        if LAUNCHED in os.environ and started is not None and started != requested:
            raise ConfigurationError(
                f"devices={num_devices} x num_nodes={num_nodes} asks for {requested} processes, but the "
                f'launcher started WORLD_SIZE={started}. Write devices="auto" in the script, or start it '
                f"with `fabric run --devices {num_devices} --num-nodes {num_nodes}`."
            )
        if not self.creates_processes_externally and "SLURM_JOB_ID" in os.environ:
            use_slice("slurm").check_allocation(num_devices, num_nodes)

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Return the store of rank zero, or of the process that launched a function.

        Arguments and errors as for `ClusterEnvironment.make_store`.
        """
        from fabric.launch.stores import prefix_store

        if world_size == 1:  # no port is needed
            from torch.distributed import HashStore

            return HashStore()
        is_host = rank == 0 and os.environ.get(LAUNCHED) != "function"
        listen_fd = int_variable(STORE_FD) if is_host else None
        if listen_fd is not None:
            os.set_inheritable(listen_fd, False)  # children of this rank must not inherit the port
            del os.environ[STORE_FD]  # used once
        return prefix_store(self.main_address, self.main_port, is_host, timeout, listen_fd, world_size)

    def _read(self, name: str, default: int) -> int:
        if name in self._overrides:
            return self._overrides[name]
        value = int_variable(name) if self.creates_processes_externally or name == "NODE_RANK" else None
        return default if value is None else value


LightningEnvironment = LocalEnvironment
"""Lightning's name for `LocalEnvironment`."""
