"""The base of every environment: the place of this process and the store through which ranks meet.

Method names are Lightning's, so users' subclasses carry over. It reads os.environ and never sets it.
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from fabric.core.errors import LaunchError

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

# One store for each address, for as long as the process lives: rank zero may make a second group while the
# others still use the first, and its port would be taken. Of a forked child none of them is its own.
_stores: dict[tuple[int, str, int], tuple[Store, itertools.count[int]]] = {}


class ClusterEnvironment(ABC):
    """Where this process stands in the job, and where rank zero listens."""

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether something else (torchrun, SLURM, `fabric run`) has started all ranks already."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """Host name or address of rank zero's machine."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """Port on which rank zero listens."""

    @staticmethod
    @abstractmethod
    def detect() -> bool:
        """Whether this process was started in such an environment."""

    @abstractmethod
    def world_size(self) -> int:
        """Number of processes of the job."""

    @abstractmethod
    def set_world_size(self, size: int) -> None:
        """Take the number of processes; ignored where the environment dictates it."""

    @abstractmethod
    def global_rank(self) -> int:
        """Index of this process in the job, from 0."""

    @abstractmethod
    def set_global_rank(self, rank: int) -> None:
        """Take the index of this process in the job; ignored where the environment dictates it."""

    @abstractmethod
    def local_rank(self) -> int:
        """Index of this process on its machine, from 0."""

    @abstractmethod
    def node_rank(self) -> int:
        """Index of this machine in the job, from 0."""

    def local_world_size(self) -> int | None:
        """Number of processes on this machine; None where the environment does not know."""
        return None

    def num_nodes(self) -> int | None:
        """Number of machines; None where the environment does not know."""
        return None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:  # noqa: B027  optional
        """Compare the processes that exist with what the user asked for.

        Args:
            num_devices: Processes per machine that `devices=` asks for.
            num_nodes: Machines that `num_nodes=` asks for.

        Raises:
            ConfigurationError: They differ (only environments that know the number of processes).
        """

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """The key-value store of the job: rank zero hosts it, the others connect; nobody waits.

        Args:
            rank: Global rank of this process.
            world_size: Number of processes of the job.
            timeout: How long to try to reach rank zero; also the default of each later wait on the store.

        Raises:
            LaunchError: Rank zero's port is taken, or rank zero cannot be reached in time.
        """
        from torch.distributed import PrefixStore

        address, port = self.main_address, self.main_port
        place = (os.getpid(), address, port)
        if place not in _stores:
            store = open_store(address, port, rank == 0, world_size, timeout, remedy=self._port_remedy())
            _stores[place] = store, itertools.count()
        store, openings = _stores[place]
        store.set_timeout(timeout)
        # Ranks open stores in the same order: equal numbers meet, stale keys of earlier groups do not.
        return PrefixStore(f"fabric{next(openings)}", store)

    def teardown(self) -> None:  # noqa: B027  optional
        """Release what the environment holds."""

    def _port_remedy(self) -> str:
        return PORT_REMEDY


PORT_REMEDY = (
    "On one machine leave MASTER_PORT (--main-port) out and the kernel gives a free one; on several choose "
    "another number."
)
"""What to do where the user chose the port."""


def open_store(
    address: str,
    port: int,
    host: bool,
    world_size: int,
    timeout: timedelta,
    listen_fd: int | None = None,
    remedy: str = PORT_REMEDY,
) -> Store:
    """A TCPStore with errors that say what to do; `listen_fd` is an already listening socket (host only).

    Raises:
        LaunchError: The port is taken (host), or nobody answers there within `timeout` (client).
    """
    from torch.distributed import DistError, TCPStore

    try:
        return TCPStore(
            address,
            port,
            world_size,
            is_master=host,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    except DistError as error:
        if host and "EADDRINUSE" in str(error):
            raise port_taken(address, port, remedy) from error
        who = "could not listen on" if host else f"found no rank zero within {timeout.total_seconds():g} s at"
        raise LaunchError(
            f"This process {who} {address}:{port} (MASTER_ADDR and MASTER_PORT, or the scheduler, said so): "
            f"{error} Check that rank zero was started, that the name resolves here, and that no firewall "
            "is between; a slow start gets more time with startup_timeout=timedelta(minutes=...)."
        ) from error


def port_taken(address: str, port: int, remedy: str = PORT_REMEDY) -> LaunchError:
    """The error for a port that somebody else holds."""
    return LaunchError(
        f"Rank zero cannot listen on {address}:{port}: another process on this machine holds the port. "
        f"{remedy}"
    )
