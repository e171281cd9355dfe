"""Which files are of safetensors. What reads and writes them is loaded only where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from fabric.core.types import PathLike

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""In a directory of Hugging Face: which tensor is in which file."""
INDICES = ".safetensors.index.json"
LENGTH = 8
"""Bytes at the start of a file that say how long its header is."""


def is_safetensors(path: PathLike) -> bool:
    """Whether a file of this name is written as safetensors."""
    return str(path).endswith(".safetensors")


def found_at(path: Path, name: PathLike) -> bool:
    """Whether at `path` is a safetensors file, or a directory of Hugging Face with one or more. A file whose
    name ends so counts as one, unless it is a ZIP archive, which is torch's.
    """
    if path.is_dir():
        return any([(path / name).is_file() for name in (SINGLE, INDEX)])
    if not path.is_file() or path.name.endswith(INDICES):
        return path.is_file()
    with path.open("rb") as file:
        start = file.read(LENGTH + 1)
    return start[LENGTH:] == b"{" or (is_safetensors(name) and not start.startswith(b"PK"))
