"""Read and write files: local ones with pathlib, URLs such as `s3://...` with fsspec, imported on first use.

Called by loggers and checkpoint IO. Remote files are never cached.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError, MissingExtraError
from fabric.core.lazy import lazy_names

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from fabric.core.types import PathLike

__getattr__ = lazy_names(__name__)


def get_filesystem(path: PathLike, **kwargs: Any) -> AbstractFileSystem:
    """Return the fsspec file system for the scheme of `path`; `kwargs` (credentials, ...) are passed to it.

    Raises:
        MissingExtraError: fsspec, or its driver for this scheme, is not installed.
        ConfigurationError: fsspec does not support the scheme.
    """
    try:
        from fsspec.core import url_to_fs

        filesystem = url_to_fs(os.fspath(path), **kwargs)[0]
    except (ImportError, ValueError) as error:
        missing = isinstance(error, ImportError)
        if not missing and "Protocol not known" not in str(error):
            raise
        raise (MissingExtraError if missing else ConfigurationError)(
            f"{str(path)!r} cannot be opened: {error}. Write a path, or a URL that fsspec supports, with "
            "its driver: s3://BUCKET/NAME after `pip install fsspec s3fs`."
        ) from error
    filesystem.invalidate_cache()  # other processes write files, too
    return filesystem


def is_url(path: PathLike) -> bool:
    """Whether `path` has a scheme: `s3://...`, `memory://...`, `file://...`."""
    return "://" in os.fspath(path)


def local_path(path: PathLike) -> Path | None:
    """Return the absolute local path; None for a URL other than `file://` and `local://`.

    Raises:
        ConfigurationError: `path` is a URL that was made a `Path`, which removes a slash.
    """
    if is_url(path):
        scheme, _, rest = os.fspath(path).partition("://")
        return Path(rest).absolute() if scheme in ("file", "local") else None
    broken = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", str(path))
    if isinstance(path, Path) and broken:
        raise ConfigurationError(
            f"{path!r} was a URL, but Path removes a slash from URLs. Pass the string "
            f"{str(path).replace(':/', '://', 1)!r}."
        )
    return Path(path).absolute()


def target_path(path: PathLike) -> Path | None:
    """Return the local path to write to; for a symbolic link its target, which need not exist."""
    local = local_path(path)
    if local is None or not local.is_symlink() or local.is_fifo():  # /dev/stdout links to an unnamed pipe
        return local
    return Path(os.path.realpath(local))


def join_path(root: PathLike, *parts: str) -> str:
    """Return `root` extended by `parts`; a URL keeps its slashes."""
    if is_url(root):
        return "/".join([os.fspath(root).rstrip("/"), *parts])
    return str(Path(root).joinpath(*parts))


def list_directory(path: PathLike) -> list[str]:
    """Return the names in a directory; [] if it does not exist."""
    try:
        if is_url(path):
            return [
                entry.rstrip("/").rsplit("/", 1)[-1] for entry in get_filesystem(path).ls(path, detail=False)
            ]
        return [entry.name for entry in Path(path).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_text(path: PathLike) -> str | None:
    """Return the text of a file with its line ends unchanged; None if it does not exist."""
    try:
        if is_url(path):
            return str(get_filesystem(path).cat_file(os.fspath(path)).decode())
        return Path(path).read_bytes().decode()
    except FileNotFoundError:
        return None


def write_text(path: PathLike, text: str) -> None:
    """Write `text` to a file, and create its directory. A local file is replaced atomically."""
    if is_url(path):
        system = get_filesystem(path)
        system.makedirs(os.fspath(path).rsplit("/", 1)[0], exist_ok=True)
        system.pipe_file(os.fspath(path), text.encode())
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_bytes(text.encode())
    temporary.replace(target)


def append_text(path: PathLike, text: str) -> None:
    """Append `text` to a file. On object stores, which cannot append, the file is read and rewritten."""
    if is_url(path):
        write_text(path, (read_text(path) or "") + text)
        return
    with Path(path).open("ab") as file:
        file.write(text.encode())
