"""The base of every environment: the place of this process and the store through which ranks meet.

Method names are Lightning's, so users' subclasses carry over. It reads os.environ and never sets it.
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

    elsewhere = False
    """Whether ranks run where this process does not: what devices there are is not looked up here."""

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
        """Take `size` as the number of processes; ignored where the environment dictates it."""

    @abstractmethod
    def global_rank(self) -> int:
        """Index of this process in the job, from 0."""

    @abstractmethod
    def set_global_rank(self, rank: int) -> None:
        """Take `rank` as the index of this process in the job; ignored where the environment dictates it."""

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

    def make_launcher(self, strategy: Any) -> Any | None:
        """A `Launcher` of the ranks of a parallel strategy, if the environment has a way of its own."""
        return None

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """The key-value store of the job: rank zero hosts it, the others connect; nobody waits.

        Args:
            rank: Global rank of this process.
            world_size: Number of processes of the job.
            timeout: How long to try to reach rank zero; also the default of each later wait on the store.

        Raises:
            LaunchError: Rank zero's port is taken, or rank zero cannot be reached in time.
        """
        from fabric.launch.stores import part_of_store

        return part_of_store(self.main_address, self.main_port, rank == 0, timeout)

    def teardown(self) -> None:  # noqa: B027  optional
        """Release what the environment holds."""


def whole_number(name: str) -> int | None:
    """The number in an environment variable; None: it is not set, or empty.

    Raises:
        ConfigurationError: It is no number.
    """
    text = os.environ.get(name, "").strip()
    try:
        return int(text) if text else None
    except ValueError:
        raise ConfigurationError(
            f"The environment variable {name}={os.environ[name]!r} must be a whole number. Unset it or "
            "correct it."
        ) from None
