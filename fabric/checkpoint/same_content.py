"""Whether all ranks load the same checkpoint.

They may not: each picks the newest file of a directory, and a network file system shows them different ones.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from fabric.checkpoint.state import sharded_objects
from fabric.core.errors import UsageError
from fabric.core.messages import by_value
from fabric.core.tree import flatten
from fabric.utilities.cloud_io import local_path
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fabric.checkpoint.digest import Sealed
    from fabric.core.types import PathLike

_END = 1 << 16
"""Bytes at the end of a file that are read."""
_MAX_ENDS = 8
"""Largest number of files of a directory whose ends are read."""


def content_of(path: PathLike, ranges: Sequence[Sealed] = ()) -> str:
    """Return a text for the content of a checkpoint.

    Without `ranges` it is from sizes and the ends of files: torch's have a checksum of each tensor there.
    """
    facts: Any = [each[1:4] for each in ranges]
    local = local_path(path)
    if not ranges:
        if local is None or not local.exists():
            return str(path)
        # Hidden files are locks and caches of downloads, which differ between ranks.
        names = sorted([file.relative_to(local) for file in local.rglob("*") if file.is_file()])
        shown = [name for name in names if not any([part.startswith(".") for part in name.parts])]
        files = [local] if local.is_file() else [local / name for name in shown]
        sizes = [(str(file.relative_to(local)), file.stat().st_size) for file in files]
        facts = sizes, [_end_of(file) for file in files[:_MAX_ENDS]]
    return f"CRC-32 {zlib.crc32(repr(facts).encode()):08x}"


def _end_of(file: Path) -> int:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _END))
        return zlib.crc32(opened.read())


def compare_content(strategy: Any, state: Any, contents: list[tuple[str, str, int]]) -> None:
    """Compare what the ranks load into `state`: `contents` has for each rank the content, the path and the
    rank of the job.

    Raises:
        UsageError: They differ, and the state of a model or optimizer is sharded.
    """
    if state is None or state == {} or len({content for content, *_ in contents}) == 1:
        return
    each = {rank: f"{path} ({content})" for content, path, rank in contents}
    text = f"Ranks load different checkpoints ({by_value(each)})"
    fix = (
        "Let one rank choose: path = fabric.broadcast(path), in a directory that all ranks read. To read one "
        "file per rank, call torch.load(path)."
    )
    if split := sharded_objects(strategy, [unwrap(leaf) for leaf in flatten(state)[0]]):
        raise UsageError(f"{text}, so {split[0]} would be joined from shards of several. {fix}")
    rank_zero_warn(f"{text}. Entries of `state` can then differ between ranks. {fix}")
