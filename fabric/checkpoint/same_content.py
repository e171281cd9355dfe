"""Whether all ranks load the same checkpoint.

They may not: each picks the newest file of a directory, and a network file system shows them different ones.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from fabric.checkpoint.state import split_objects
from fabric.core.errors import UsageError
from fabric.core.messages import by_value
from fabric.core.tree import flatten
from fabric.utilities.cloud_io import local_path
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabric.checkpoint.digest import Sealed
    from fabric.core.types import PathLike


def content_of(path: PathLike, ranges: Sequence[Sealed]) -> str:
    """Return a text for the content of a checkpoint; without a digest, for its name and size."""
    if ranges:
        return f"CRC-32 {zlib.crc32(repr([each[1:4] for each in ranges]).encode()):08x}"
    local = local_path(path)
    if local is None:
        return str(path)
    return f"{local.stat().st_size} bytes, named {local.name}" if local.is_file() else local.name


def compare_content(strategy: Any, state: Any, contents: list[tuple[str, str]]) -> None:
    """Compare what the ranks load into `state`: `contents` has for each rank the content and the path.

    Raises:
        UsageError: They differ, and the state of a model or optimizer is sharded.
    """
    if state is None or state == {} or len({content for content, _ in contents}) == 1:
        return
    each = {rank: f"{path} ({content})" for rank, (content, path) in enumerate(contents)}
    text = f"Ranks load different checkpoints ({by_value(each)})"
    fix = (
        "Let one rank choose: path = fabric.broadcast(path), in a directory that all ranks read. A file of "
        "each rank's own is read with torch.load(path)."
    )
    if split := split_objects(strategy, [unwrap(leaf) for leaf in flatten(state)[0]]):
        raise UsageError(f"{text}, so {split[0]} would be joined from shards of several. {fix}")
    rank_zero_warn(f"{text}. Numbers such as a step can then differ between ranks. {fix}")
