"""Files under paths of any kind: local ones by pathlib, `s3://` and the like by fsspec, loaded on first need.

Called by loggers and checkpoint IO. Never caches a remote file.
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
    """The fsspec file system that `path` names by its scheme; `kwargs` (credentials, ...) go to it.

    Raises:
        MissingExtraError: fsspec, or its driver for this scheme, is not installed.
        ConfigurationError: fsspec knows no such scheme.
    """
    try:
        from fsspec.core import url_to_fs

        filesystem = url_to_fs(os.fspath(path), **kwargs)[0]
    except (ImportError, ValueError) as error:
        missing = isinstance(error, ImportError)
        if not missing and "Protocol not known" not in str(error):
            raise
        raise (MissingExtraError if missing else ConfigurationError)(
            f"{str(path)!r} cannot be opened: {error}. Write a path, or a URL of a kind that fsspec knows, "
            "with its driver: s3://BUCKET/NAME after `pip install fsspec s3fs`."
        ) from error
    filesystem.invalidate_cache()  # others write there, too
    return filesystem


def is_url(path: PathLike) -> bool:
    """Whether `path` names a scheme: `s3://...`, `memory://...`, `file://...`."""
    return "://" in os.fspath(path)


def local_path(path: PathLike) -> Path | None:
    """The absolute path on this machine's file systems; None for a URL of another kind.

    Raises:
        ConfigurationError: A URL went through `pathlib`, which takes out a slash.
    """
    if is_url(path):
        scheme, _, rest = os.fspath(path).partition("://")
        return Path(rest).absolute() if scheme in ("file", "local") else None
    broken = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", str(path))
    if isinstance(path, Path) and broken:
        raise ConfigurationError(
            f"{path!r} was a URL, and Path took a slash out of it. Pass the string "
            f"{str(path).replace(':/', '://', 1)!r}."
        )
    return Path(path).absolute()


def target_path(path: PathLike) -> Path | None:
    """Return the local path to write to; for a link its target, whether that exists or not."""
    local = local_path(path)
    if local is None or not local.is_symlink() or local.is_fifo():  # /dev/stdout: a pipe without a name
        return local
    return Path(os.path.realpath(local))


def join_path(root: PathLike, *parts: str) -> str:
    """`root` extended by `parts`; a URL keeps its slashes."""
    if is_url(root):
        return "/".join([os.fspath(root).rstrip("/"), *parts])
    return str(Path(root).joinpath(*parts))


def list_directory(path: PathLike) -> list[str]:
    """The names in a directory; none if it does not exist."""
    try:
        if is_url(path):
            return [
                entry.rstrip("/").rsplit("/", 1)[-1] for entry in get_filesystem(path).ls(path, detail=False)
            ]
        return [entry.name for entry in Path(path).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_text(path: PathLike) -> str | None:
    """The text of a file with its line ends unchanged; None if it does not exist."""
    try:
        if is_url(path):
            return str(get_filesystem(path).cat_file(os.fspath(path)).decode())
        return Path(path).read_bytes().decode()
    except FileNotFoundError:
        return None


def write_text(path: PathLike, text: str) -> None:
    """Write `text` as a whole file, making its directory. A local one is replaced at once: nobody reads half
    of it.
    """
    if is_url(path):
        system = get_filesystem(path)
        system.makedirs(os.fspath(path).rsplit("/", 1)[0], exist_ok=True)
        system.pipe_file(os.fspath(path), text.encode())
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    aside.write_bytes(text.encode())
    aside.replace(target)


def append_text(path: PathLike, text: str) -> None:
    """Add `text` to the end of a file. Object stores cannot: there the file is read and written anew."""
    if is_url(path):
        write_text(path, (read_text(path) or "") + text)
        return
    with Path(path).open("ab") as file:
        file.write(text.encode())
