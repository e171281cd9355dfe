"""Ranks that torchrun (torch.distributed.elastic) started. Reads its variables; reuses its store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fabric.core.errors import ConfigurationError, LaunchError
from fabric.plugins.environments.cluster_environment import ClusterEnvironment

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store


class TorchElasticEnvironment(ClusterEnvironment):
    """Processes started by `torchrun` or `python -m torch.distributed.run`."""

    @property
    def creates_processes_externally(self) -> bool:
        """Always: the agent starts all ranks."""
        return True

    @property
    def main_address(self) -> str:
        """MASTER_ADDR."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """MASTER_PORT."""
        return _variable("MASTER_PORT")

    @staticmethod
    def detect() -> bool:
        """Whether torchrun's run id is set."""
        return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ

    def world_size(self) -> int:
        """WORLD_SIZE."""
        return _variable("WORLD_SIZE")

    def set_world_size(self, size: int) -> None:
        """Do nothing: torchrun says how many ranks there are."""

    def global_rank(self) -> int:
        """RANK."""
        return _variable("RANK")

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: torchrun says which rank this is."""

    def local_rank(self) -> int:
        """LOCAL_RANK."""
        return _variable("LOCAL_RANK")

    def node_rank(self) -> int:
        """GROUP_RANK."""
        return _variable("GROUP_RANK", 0)

    def local_world_size(self) -> int | None:
        """LOCAL_WORLD_SIZE."""
        return _variable("LOCAL_WORLD_SIZE", 0) or None

    def num_nodes(self) -> int | None:
        """GROUP_WORLD_SIZE."""
        return _variable("GROUP_WORLD_SIZE", 0) or None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare what torchrun started with what the script asks for.

        Raises:
            ConfigurationError: The numbers of processes differ.
        """
        asked, started = num_devices * num_nodes, self.world_size()
        if asked != started:
            nodes = f" --nnodes {num_nodes}" if num_nodes > 1 else ""
            raise ConfigurationError(
                f"devices={num_devices} x num_nodes={num_nodes} asks for {asked} processes, but torchrun "
                f'started WORLD_SIZE={started}. Write devices="auto" and num_nodes={self.num_nodes() or 1} '
                f"in the script, or start torchrun with{nodes} --nproc-per-node {num_devices}."
            )
        here, machines = self.local_world_size() or num_devices, self.num_nodes() or num_nodes
        if (num_devices, num_nodes) != (here, machines):
            raise ConfigurationError(
                f"devices={num_devices} x num_nodes={num_nodes} asks for {num_devices} processes on each "
                f"machine, but torchrun started LOCAL_WORLD_SIZE={here} on each of "
                f'GROUP_WORLD_SIZE={machines}. Write devices="auto" and num_nodes={machines} in the script, '
                f"or start torchrun with --nnodes {num_nodes} --nproc-per-node {num_devices}."
            )

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """The agent's own store, in a part that is new for this attempt: no second port, restarts stay apart.

        All ranks call this, and rank zero waits for the others.

        Raises:
            LaunchError: The agent cannot be reached in time, or some ranks did not come.
        """
        from torch.distributed import DistError, rendezvous

        from fabric.plugins.environments.rendezvous import fresh_part

        try:
            store: Store = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
        except (DistError, ValueError) as error:
            raise LaunchError(
                f"torchrun's store at {self.main_address}:{os.environ.get('MASTER_PORT')} did not answer "
                f"within {timeout.total_seconds():g} s: {error} Check that the agent of the first node "
                "still runs."
            ) from error
        store.set_timeout(timeout)
        return fresh_part(store, rank, world_size, timeout)


def _variable(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigurationError(
            f"torchrun should have set {name} to a number, but it is {text!r}. Start the script with "
            "torchrun, or unset TORCHELASTIC_RUN_ID to leave torchrun's environment."
        ) from None
