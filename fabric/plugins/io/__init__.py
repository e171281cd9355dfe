"""Bytes to and from storage."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.plugins.io.checkpoint_io import CheckpointIO
    from fabric.plugins.io.torch_io import TorchCheckpointIO

__all__ = ["CheckpointIO", "TorchCheckpointIO"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "CheckpointIO": "fabric.plugins.io.checkpoint_io",
        "TorchCheckpointIO": "fabric.plugins.io.torch_io",
    },
)
