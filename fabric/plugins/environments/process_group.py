"""A process group that the user (or a test) has initialised already: ranks and sizes are read from it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from fabric.core.errors import ConfigurationError, UsageError
from fabric.plugins.environments.started import StartedEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch.distributed import Store


class ProcessGroupEnvironment(StartedEnvironment):
    """The place of this process in torch.distributed's default group, whoever made it."""

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, else this machine; nothing of ours connects to it."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """MASTER_PORT, else 0; nothing of ours connects to it."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """Whether `torch.distributed.init_process_group` has been called in this process."""
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def world_size(self) -> int:
        """Size of the default group."""
        return torch.distributed.get_world_size()

    def global_rank(self) -> int:
        """Rank in the default group."""
        return torch.distributed.get_rank()

    def local_rank(self) -> int:
        """LOCAL_RANK where it is set; else all ranks are taken to be on one machine."""
        return _digits("LOCAL_RANK", self.global_rank)

    def node_rank(self) -> int:
        """NODE_RANK or GROUP_RANK where set, else 0."""
        return _digits("NODE_RANK", lambda: _digits("GROUP_RANK", int))

    def local_world_size(self) -> int | None:
        """LOCAL_WORLD_SIZE where it is set; else all ranks are taken to be on one machine."""
        return _digits("LOCAL_WORLD_SIZE", self.world_size)

    def num_nodes(self) -> int | None:
        """Number of machines, as the local world size implies."""
        return max(1, self.world_size() // (self.local_world_size() or 1))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the group with what the script asks for.

        Raises:
            ConfigurationError: The group has another size.
        """
        asked, exists = num_devices * num_nodes, self.world_size()
        if asked != exists:
            raise ConfigurationError(
                f"devices={num_devices} x num_nodes={num_nodes} asks for {asked} processes, but "
                f'torch.distributed is initialised already with {exists}. Write devices="auto", or do '
                f"not call init_process_group before Fabric."
            )

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Refuse: the group exists, nobody needs to meet.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "torch.distributed is initialised already: its ranks have met. Use the existing group."
        )


def _digits(name: str, default: Callable[[], int]) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default()
