"""`CheckpointIO`: writes a checkpoint dictionary to storage and reads it. Users may pass their own class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabric.core.types import PathLike


class CheckpointIO(ABC):
    """Storage of checkpoints. Called on rank zero to save, on every rank to load."""

    facts: Mapping[str, Any] = MappingProxyType({})
    """Metadata of the run that saves (`strategy`, `world_size`, `step`), for an IO that stores it."""

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`; afterwards the file is complete, or the old one is untouched.

        Args:
            checkpoint: Tensors and plain data by name, in nested dictionaries and lists.
            path: File or URL.
            storage_options: Settings of a subclass for this save; None: its defaults.
        """

    @abstractmethod
    def load_checkpoint(
        self, path: PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the dictionary that `save_checkpoint` wrote to `path`.

        Args:
            path: File or URL.
            map_location: As in `torch.load`.
            weights_only: False trusts the file and unpickles arbitrary objects.
        """

    @abstractmethod
    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete the checkpoint at `path`, if it is there."""

    def teardown(self) -> None:  # noqa: B027 - optional to override
        """Finish pending writes, and release resources."""
