"""Bytes to and from storage."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.checkpoint.checkpoint_io import CheckpointIO as CheckpointIO
    from fabric.checkpoint.torch_io import TorchCheckpointIO as TorchCheckpointIO

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "CheckpointIO": "fabric.checkpoint.checkpoint_io",
        "TorchCheckpointIO": "fabric.checkpoint.torch_io",
    },
)
