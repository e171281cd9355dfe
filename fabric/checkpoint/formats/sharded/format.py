"""The functions that a format of directories has (see `checkpoint/formats`).

DCP is imported where a checkpoint is written or read, since that takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.checkpoint.formats.sharded.directory import refuse_foreign, sealed
from fabric.checkpoint.formats.sharded.save import save

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["opened", "refuse_foreign", "save", "sealed"]


def opened(directory: Path, safe: bool) -> Any:
    """Return a reader of the checkpoint.

    Args:
        directory: Its path.
        safe: Whether to refuse objects that safe loading does not read.
    """
    from fabric.checkpoint.formats.sharded.dcp import Checkpoint

    return Checkpoint(directory, safe)
