"""The table of checkpoint formats besides torch's own file. Saves and loads call the modules of its rows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.slices import use_module
from fabric.utilities.cloud_io import local_path

if TYPE_CHECKING:
    from pathlib import Path

    from fabric.core.types import PathLike

MANIFEST = "fabric.json"
METADATA = ".metadata"
"""Name of torch's file with the location of each tensor."""
_ARCHIVE = b"PK"
"""The first bytes of a file of `torch.save`."""


class Format(NamedTuple):
    """A format of files, which rank zero writes, or of directories, to which all ranks write.

    A format of files is chosen by the name of the file, and its module has

    - `prepared(checkpoint, path)`: the content for `write`; raises what such a file cannot hold,
    - `write(content, facts, file)`: write to a file that is open for writing,
    - `sealed(path, name)`: the ranges to verify, as `digest.Sealed`,
    - `read(path, name)`: the entries, whose tensors may be `LazyTensor`s,
    - `model_in(checkpoint, path)`: the entries that one file can hold, for `fabric consolidate`.

    A format of directories is chosen by `fabric.save(format=...)`, and its module has

    - `save(strategy, path, state, filter, facts, wait, allow_pickle)`: a function that writes a rank's part,
    - `sealed(directory)`: as above,
    - `opened(directory, safe)`: an object with `tree()`, which returns the entries, and `close()`,
    - `refuse_foreign(directory)`: raises if a save may not replace the directory.
    """

    name: str
    """The value of `fabric.save(format=...)` for a format of directories."""
    module: str
    """Imported when it is used."""
    suffix: str = ""
    """Files whose names end with it are written in this format; "": a format of directories."""
    start: tuple[int, bytes] = (0, b"\0")
    """An offset, and the bytes from there on by which a file is recognised."""
    listings: str = ""
    """Files whose names end with it list files of this format, and are read in their place."""
    files: tuple[str, ...] = ()
    """Names of files, one of which a directory of this format has. Only Fabric writes the first one."""

    def load(self) -> Any:
        """Return the module.

        Raises:
            ConfigurationError: Its folder was deleted.
        """
        return use_module(self.module)


FORMATS = [
    Format(
        "safetensors",
        "fabric.checkpoint.formats.safetensors",
        suffix=".safetensors",
        start=(8, b"{"),
        listings=".safetensors.index.json",
        files=("model.safetensors", "model.safetensors.index.json"),
    ),
    Format("sharded", "fabric.checkpoint.formats.sharded.format", files=(MANIFEST, METADATA)),
]
"""A new format needs a module and a row here."""


def format_of_name(path: PathLike) -> Format | None:
    """Return the format in which a file of this name is written; None: torch's."""
    return next((row for row in FORMATS if row.suffix and str(path).endswith(row.suffix)), None)


def format_of_file(path: Path, name: PathLike) -> Format | None:
    """Return the format of the file at `path`, or of the files in a directory; None: torch's, or none.

    Files are recognised by content. A file of another content counts by its name, unless it is one of torch.
    """
    rows = [row for row in FORMATS if row.suffix]
    if path.is_dir():
        return next((row for row in rows if any([(path / file).is_file() for file in row.files])), None)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        start = file.read(max([offset + len(magic) for row in rows for offset, magic in (row.start,)]))
    for row in rows:
        offset, magic = row.start
        if (row.listings and path.name.endswith(row.listings)) or start[offset:].startswith(magic):
            return row
    return None if start.startswith(_ARCHIVE) else format_of_name(name)


def directory_at(path: PathLike, only_ours: bool = False) -> tuple[Format, Path] | None:
    """Return the format and the path of a checkpoint that is a directory; None: there is none.

    Args:
        path: Path or URL.
        only_ours: Whether to ignore those of other programs.
    """
    local = local_path(path)
    if local is None:
        return None
    for row in FORMATS:
        names = row.files[:1] if only_ours else row.files
        if not row.suffix and any([os.path.isfile(local / name) for name in names]):  # noqa: PTH113 - never raises
            return row, local
    return None
