"""Atomic writes of files and directories on a disk.

The new content is written beside the path, locked, flushed, and put in its place by a rename. Nothing here
needs torch.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fabric.utilities.cloud_io import local_path, target_path

try:
    import fcntl
except ImportError:  # Windows: what is left there stays
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fabric.core.types import PathLike

MANIFEST = "fabric.json"
METADATA = ".metadata"
"""torch's own file: which tensor lies where."""
SINGLE = "model.safetensors"
INDICES = ".safetensors.index.json"
INDEX = f"model{INDICES}"
"""In a directory of Hugging Face: which tensor is in which file."""
LENGTH = 8
"""Bytes at the start of a safetensors file that say how long its header is."""
_held: dict[Path, int | None] = {}
"""What this process writes beside paths, and the descriptors that lock it; None: there are no locks."""


_modes: dict[Path, int] = {}
"""Directories that this process writes beside paths, and the modes that they would have by its umask."""


def present(path: PathLike) -> PathLike:
    """`path`, or what a save that was killed between its two renames has left of the checkpoint there."""
    local = target_path(path)
    if local is None or os.path.lexists(local):
        return path
    aside = sorted(_beside(local, "old"), key=lambda old: old.lstat().st_mtime)
    return aside[-1] if aside else path


def sharded_at(path: PathLike, only_ours: bool = False) -> Path | None:
    """The sharded checkpoint at `path`, written by `fabric.save` or by torch; None: there is none."""
    local = local_path(path)
    names = (MANIFEST,) if only_ours else (MANIFEST, METADATA)
    there = local is not None and any([os.path.isfile(local / name) for name in names])  # noqa: PTH113 - never raises
    return local if there else None


def is_safetensors(path: PathLike) -> bool:
    """Whether a file of this name is written as safetensors."""
    return str(path).endswith(".safetensors")


def safetensors_at(path: Path, name: PathLike) -> bool:
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


def part_of(path: Path, directory: bool) -> Path:
    """A new file or directory beside `path`, held until `put_in_place` or `remove`.

    Those of saves to `path` that nobody holds were killed, and are removed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"{path} cannot be written: {path.parent} is a file.") from None
    with alone_in(path.parent):  # who makes one has locked it before another looks for left ones
        for left in _beside(path, "part"):
            if not is_held(left):
                remove(left)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        if directory:
            part.mkdir()
            _modes[part] = stat.S_IMODE(part.stat().st_mode)
            part.rmdir()
            part.mkdir(0o700)  # nobody else may write into it, or read it, before it has its name
        else:
            part.touch(exist_ok=False)
        hold(part)
    return part


def copy_mode(old: Path, new: Path) -> None:
    """Give a new file or directory the mode of what it is to replace; nothing is there: leave it as it is.

    A file takes from a directory who may read and write, and a directory from a file who may open it, too.
    """
    if not old.exists():
        return
    mode = stat.S_IMODE(old.stat().st_mode)
    if new.is_dir() and not old.is_dir():
        mode |= (mode & 0o444) >> 2
    elif old.is_dir() and not new.is_dir():
        mode &= 0o666
    new.chmod(mode)


def _open_up(part: Path, path: Path) -> None:
    """Give a directory of 0700, and the files in it, the modes that it is to have in its place."""
    part.chmod(_modes.pop(part))
    copy_mode(path, part)
    if path.is_file() or (path / METADATA).is_file():
        for file in part.iterdir():
            if file.is_file():
                copy_mode(path if path.is_file() else path / METADATA, file)


def hold(path: Path) -> None:
    """Lock a file or directory of this process until it is removed or put in place, or the process ends."""
    _held[path] = _lock(path)


def is_held(path: Path) -> bool:
    """Whether a living process holds it, as far as this file system tells."""
    lock = _lock(path)
    if lock is not None:
        os.close(lock)
    return lock is None


def _lock(path: Path, wait: bool = False) -> int | None:
    """Lock a file or directory until the descriptor is closed; None: it is locked, or there are no locks."""
    if fcntl is None:
        return None
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return descriptor
        except OSError:
            os.close(descriptor)
    return None


def _let_go(part: Path) -> None:
    lock = _held.pop(part, None)
    if lock is not None:
        os.close(lock)


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Let other saves into this directory wait, where there are locks."""
    lock = _lock(directory, wait=True)
    try:
        yield
    finally:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also in processes that were forked meanwhile
            os.close(lock)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of a file, or without one, name the checkpoint at `path`, of which it would be a part."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not error.filename2:
            error.filename = str(path)
        raise


def put_in_place(part: Path, path: Path) -> None:
    """Give a complete checkpoint its name. If it is a directory, or replaces one, what had the name is set
    aside first, and deleted last.
    """
    if not part.is_dir() and not path.is_dir():
        part.replace(path)
        _let_go(part)
        flush_directory(path.parent)
        return
    aside = part.with_suffix(".old")
    if part in _modes:
        _open_up(part, path)
    with alone_in(path.parent):
        if os.path.lexists(path):
            path.rename(aside)
        try:
            part.rename(path)
        except BaseException:
            if os.path.lexists(aside):
                aside.rename(path)
            raise
        _let_go(part)
        flush_directory(path.parent)
        before = _beside(path, "old")  # also of saves that were killed
    for rest in before:
        remove(rest)


def remove(path: Path) -> None:
    """Delete a file or directory, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    _let_go(path)
    _modes.pop(path, None)


def flush_directory(directory: Path) -> None:
    """Let names in a directory reach the disk. Some systems cannot open one; there they do by themselves."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, suffix: str) -> list[Path]:
    """Return the paths that saves to `path` have left beside it: "old", set aside; "part", not complete."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.{suffix}")
    try:
        return [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]
    except OSError:
        return []
