"""`ClusterEnvironment`: the base class of environments, with this process's ranks and the rendezvous store.

Method names are Lightning's, so users' subclasses work. It reads os.environ and never sets it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store


class ClusterEnvironment(ABC):
    """Ranks of this process in the job, and the address of rank zero."""

    remote_ranks = False
    """Whether ranks run on other machines than this process, whose devices are then not used."""

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether a launcher (torchrun, SLURM, `fabric run`) has started all ranks already."""

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
        """Set the number of processes to `size`; ignored if the environment determines it."""

    @abstractmethod
    def global_rank(self) -> int:
        """Index of this process in the job, from 0."""

    @abstractmethod
    def set_global_rank(self, rank: int) -> None:
        """Set the index of this process in the job to `rank`; ignored if the environment determines it."""

    @abstractmethod
    def local_rank(self) -> int:
        """Index of this process on its machine, from 0."""

    @abstractmethod
    def node_rank(self) -> int:
        """Index of this machine in the job, from 0."""

    def local_world_size(self) -> int | None:
        """Number of processes on this machine; None: unknown."""
        return None

    def num_nodes(self) -> int | None:
        """Number of machines; None: unknown."""
        return None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:  # noqa: B027  optional
        """Compare the launched processes with the arguments of `Fabric`.

        Args:
            num_devices: Processes per machine according to `devices=`.
            num_nodes: Machines according to `num_nodes=`.

        Raises:
            ConfigurationError: They differ (only in environments with a known number of processes).
        """

    def make_launcher(self, strategy: Any) -> Any | None:
        """Return this environment's `Launcher` for the ranks of `strategy`; None: the default one."""
        return None

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Return the key-value store of the job, hosted by rank zero; does not wait for other ranks.

        Args:
            rank: Global rank of this process.
            world_size: Number of processes of the job.
            timeout: Limit for connecting to rank zero; also the default of each later wait on the store.

        Raises:
            LaunchError: Rank zero's port is taken, or rank zero cannot be reached in time.
        """
        from fabric.launch.stores import prefix_store

        return prefix_store(self.main_address, self.main_port, rank == 0, timeout, world_size=world_size)

    def teardown(self) -> None:  # noqa: B027  optional
        """Release the environment's resources."""


def int_variable(name: str) -> int | None:
    """Return the number in an environment variable; None: it is not set, or empty.

    Raises:
        ConfigurationError: The value is no whole number.
    """
    text = os.environ.get(name, "").strip()
    try:
        return int(text) if text else None
    except ValueError:
        raise ConfigurationError(
            f"The environment variable {name}={os.environ[name]!r} must be a whole number. Unset it or "
            "correct it."
        ) from None
