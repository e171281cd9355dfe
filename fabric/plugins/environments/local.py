"""This machine, or several started by hand: ranks that `python train.py`, spawn/fork or `fabric run` started.

Knows its place from the variables of our own launchers or from `become`. Never sets os.environ.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError
from fabric.plugins.environments.cluster_environment import ClusterEnvironment, whole_number

if TYPE_CHECKING:
    from torch.distributed import Store

LAUNCHED = "FABRIC_LAUNCHED"
"""Set in ranks that we started: "script" or "cli"."""
STORE_FD = "FABRIC_STORE_FD"
"""Set in rank zero under `fabric run`: the file descriptor of a socket that already listens."""


class LocalEnvironment(ClusterEnvironment):
    """Processes on this machine, started by us, or on several with `fabric run --num-nodes`."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}
        self._address: str | None = None
        self._port: int | None = None
        self._child = self._listens = False

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process is one of the ranks already, so that nothing is left to start."""
        return self._child or LAUNCHED in os.environ or "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, else this machine."""
        return self._address or os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port of the store; a process that nobody launched opens one (raises like `host_store`)."""
        if self._port is not None:
            return self._port
        if (port := whole_number("MASTER_PORT")) is not None:
            return port
        return self.host_store(timedelta(minutes=5))

    @staticmethod
    def detect() -> bool:
        """Always: this is what remains when no cluster is found."""
        return True

    def world_size(self) -> int:
        """Number of processes of the job."""
        return self._read("WORLD_SIZE", 1)

    def set_world_size(self, size: int) -> None:
        """Take `size` as the number of processes of the job."""
        self._place["WORLD_SIZE"] = size

    def global_rank(self) -> int:
        """Index of this process in the job."""
        return self._read("RANK", 0)

    def set_global_rank(self, rank: int) -> None:
        """Take `rank` as the index of this process in the job."""
        self._place["RANK"] = rank

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
        """Compare what `fabric run` started, or what SLURM would start, with what the script asks for.

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

    def become(
        self,
        local_rank: int,
        world_size: int,
        local_world_size: int,
        main_address: str,
        main_port: int,
        node_rank: int = 0,
        child: bool = True,
    ) -> None:
        """Take the place that a launcher assigned.

        Args:
            local_rank: Index of this process on its machine, from 0.
            world_size: Number of processes of the job.
            local_world_size: Number of processes on this machine.
            main_address: Of rank zero's machine.
            main_port: On which rank zero listens.
            node_rank: Index of this machine, from 0.
            child: Whether it was another process that started the others.
        """
        self._place = {
            "RANK": node_rank * local_world_size + local_rank,
            "LOCAL_RANK": local_rank,
            "NODE_RANK": node_rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": local_world_size,
        }
        self._address, self._port, self._child = main_address, main_port, child
        self._listens = False  # a store that this process hosts for a job lives as long as the process
        if child:
            from fabric.plugins.environments.stores import close_inherited

            close_inherited()

    def follow(self, other: LocalEnvironment) -> None:
        """Take the place of `other`, which was launched before in this process; its store lives on."""
        self._place, self._address, self._port = dict(other._place), other._address, other._port
        self._child = other._child

    def take_port(self, num_nodes: int = 1) -> int:
        """Listen at the port of the store to come, and return it: who connects waits for `host_store`.

        Args:
            num_nodes: With more than one it listens on all interfaces, else on the loopback only.

        Raises:
            LaunchError: The user's MASTER_PORT is taken.
            ConfigurationError: MASTER_PORT is no port number.
        """
        from fabric.plugins.environments.stores import take_port

        if self._port is None or not self._listens:
            self._port = take_port(self.main_address, whole_number("MASTER_PORT") or 0, num_nodes > 1)
            self._listens = True
        return self._port

    def host_store(self, timeout: timedelta, num_nodes: int = 1) -> int:
        """Host the store of the job in this process and return its port; a second call returns the same port.

        Args:
            timeout: Default of each later wait on the store.
            num_nodes: As in `take_port`, which also says what is raised.
        """
        from fabric.plugins.environments.stores import open_store

        port = self.take_port(num_nodes)
        open_store(self.main_address, port, True, timeout)
        return port

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """The hosted store in the hosting process, else a connection to it (raises as the base does)."""
        from fabric.plugins.environments.stores import part_of_store
        from fabric.processes.lifeline import tie_to_parent

        tie_to_parent()
        hosts = rank == 0 and not self._child
        handed = whole_number(STORE_FD) if hosts else None
        if hosts and handed is None and "LOCAL_WORLD_SIZE" not in self._place:  # else it hosts it since
            self.host_store(timeout, num_nodes=self.num_nodes() or 1)
        return part_of_store(self.main_address, self.main_port, hosts, timeout, handed)

    def teardown(self) -> None:
        """Close the store, if this environment has opened its port in this process."""
        if self._listens and self._port is not None:
            from fabric.plugins.environments.stores import close_store

            close_store(self.main_address, self._port)
        self._listens = False

    def _read(self, name: str, default: int) -> int:
        if name in self._place:
            return self._place[name]
        value = whole_number(name) if self.creates_processes_externally or name == "NODE_RANK" else None
        return default if value is None else value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_listens": False}  # a copy must not close the store of the original


LightningEnvironment = LocalEnvironment
"""Lightning's name for it."""
