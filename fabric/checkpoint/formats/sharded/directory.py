"""The directory of a sharded checkpoint on a disk, checked against its manifest.

`fabric.json` is the manifest, written last: sizes and digests of all other files. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import TYPE_CHECKING, Any

from fabric.checkpoint.atomic_write import directory_lock, flush_directory, temporary_path
from fabric.checkpoint.content import listed_file
from fabric.checkpoint.crc import crc_of_range
from fabric.checkpoint.digest import Sealed, damaged, verify
from fabric.checkpoint.formats.registry import MANIFEST, METADATA
from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1


def digest(file: Path) -> dict[str, Any]:
    """Return size and digest of a file, for the manifest."""
    size = file.stat().st_size
    return {"size": size, "crc32": crc_of_range(file, 0, size)}


def write_manifest(directory: Path, files: dict[str, Any], **facts: Any) -> None:
    """Write the manifest, and flush it and the directory to the disk."""
    facts = {"format": FORMAT, **facts, "files": dict(sorted(files.items()))}
    with (directory / MANIFEST).open("x") as stream:
        stream.write(_render(facts))
        stream.flush()
        os.fsync(stream.fileno())
    flush_directory(directory)


def sealed(directory: Path) -> list[Sealed]:
    """Return the ranges to verify of a checkpoint: all its files; none without a manifest.

    Raises:
        DamagedCheckpointError: A file is missing, or has another size; the message names it.
    """
    if not (directory / MANIFEST).exists():  # written by torch; for a checkpoint of Fabric the reader raises
        return []
    found = []
    for name, entry in sorted(_read_manifest(directory)["files"].items()):
        file = listed_file(directory, name)
        if file.stat().st_size != entry["size"]:
            raise damaged(directory, f"{name} has {file.stat().st_size} bytes instead of {entry['size']}")
        found.append(
            Sealed(file, 0, entry["size"], entry["crc32"], damaged(directory, f"{name} has changed"))
        )
    return found


def check(directory: Path, place: int, ranks: int) -> None:
    """Check every `ranks`-th file of a checkpoint, from number `place` on; none without a manifest.

    Raises:
        DamagedCheckpointError: A file is missing or was changed; the message names it.
    """
    verify(sealed(directory)[place::ranks])


def begin(path: Path) -> Path:
    """Create the temporary directory of a save to `path`; end with `commit_path` or `remove`.

    Raises:
        IsADirectoryError: `path` is a directory with files that no save has written.
        OSError: The directory cannot be made.
    """
    with directory_lock(path.parent):
        refuse_foreign(path)
    if path.exists() and not (path.is_dir() or path.is_file()):
        raise FileExistsError(
            f"{path} exists and is neither a file nor a directory, so a checkpoint cannot replace it. Write "
            "another path."
        )
    return temporary_path(path, directory=True)


def refuse_foreign(path: Path) -> None:
    """Raise IsADirectoryError if `path` is a directory with files that no save has written."""
    if not path.is_dir():
        return
    ours = (MANIFEST, METADATA)
    others = [e.name for e in path.iterdir() if e.name not in ours and e.suffix != ".distcp"]
    if others and (path / MANIFEST).is_file():  # an engine's files have names of their own
        written = {name.partition("/")[0] for name in _read_manifest(path)["files"]}
        others = [name for name in others if name not in written]
    if others:
        raise IsADirectoryError(
            f"{path} is a directory with {others[0]!r} in it, which a new checkpoint would delete. Give the "
            f"checkpoint a name of its own, for example {path / 'checkpoint'}."
        )


def _render(facts: dict[str, Any]) -> str:
    """Return the manifest's text, with a digest of itself."""
    code = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    return json.dumps({**facts, "crc32": code}, indent=1) + "\n"


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        text = listed_file(directory, MANIFEST).read_text()
        facts: dict[str, Any] = json.loads(text)
        facts.pop("crc32")
        whole = _render(facts) == text
    except (ValueError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise damaged(directory, f"{MANIFEST} is not what was written")
    if facts["format"] > FORMAT:
        raise UsageError(
            f"{directory} is a checkpoint of format {facts['format']}, and this fabric reads up to {FORMAT}. "
            "Update fabric."
        )
    return facts
