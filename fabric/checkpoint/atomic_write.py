"""Atomic writes of files and directories on a disk.

The new content is written to a temporary path in the same directory, locked, flushed, and renamed.
Nothing here needs torch.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fabric.checkpoint.formats.registry import METADATA
from fabric.checkpoint.freed_files import freed_later, wait_until_freed
from fabric.utilities.cloud_io import target_path

try:
    import fcntl
except ImportError:  # Windows: temporary paths of killed saves stay
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fabric.core.types import PathLike

_locks: dict[Path, int | None] = {}
"""Temporary paths of this process, and the descriptors that lock them; None: no locks on this system."""


_modes: dict[Path, int] = {}
"""Temporary directories of this process, and their modes by its umask."""


def present(path: PathLike) -> PathLike:
    """Return `path`, or the former checkpoint if a save was killed between its two renames."""
    local = target_path(path)
    if local is None or os.path.lexists(local):
        return path
    aside = sorted(_leftovers(local, "old"), key=lambda old: old.lstat().st_mtime)
    return aside[-1] if aside else path


def temporary_path(path: Path, directory: bool) -> Path:
    """Create a file or directory next to `path`, locked until `commit_path` or `remove`; return its path.

    Unlocked temporary paths belong to saves to `path` that were killed; they are removed.
    """
    wait_until_freed()  # the disk may have no space for three checkpoints
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(
            f"{path} cannot be written: {path.parent} is a file. Write a path in a directory."
        ) from None
    with directory_lock(path.parent):  # no other process removes the new path before it is locked
        for left in _leftovers(path, "part"):
            if not is_locked(left):
                remove(left)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        if directory:
            part.mkdir()
            _modes[part] = stat.S_IMODE(part.stat().st_mode)
            part.rmdir()
            part.mkdir(0o700)  # other users may neither write nor read before the rename
        else:
            part.touch(exist_ok=False)
        keep_locked(part)
    return part


def copy_mode(old: Path, new: Path) -> None:
    """Copy the mode of the path that will be replaced to a new file or directory, if it exists.

    From a directory to a file only read and write bits are copied. A directory that replaces a file also gets
    an execute bit for each read bit.
    """
    if not old.exists():
        return
    mode = stat.S_IMODE(old.stat().st_mode)
    if new.is_dir() and not old.is_dir():
        mode |= (mode & 0o444) >> 2
    elif old.is_dir() and not new.is_dir():
        mode &= 0o666
    new.chmod(mode)


def _apply_modes(part: Path, path: Path) -> None:
    """Set the final modes of a directory that was created with 0700, and of the files in it."""
    part.chmod(_modes.pop(part))
    copy_mode(path, part)
    if path.is_file() or (path / METADATA).is_file():
        for file in part.iterdir():
            if file.is_file():
                copy_mode(path if path.is_file() else path / METADATA, file)


def keep_locked(path: Path) -> None:
    """Lock a file or directory until it is removed or committed, or the process ends."""
    _locks[path] = _lock(path)


def is_locked(path: Path) -> bool:
    """Whether a running process has locked the path, as far as the file system supports locks."""
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


def _unlock(part: Path) -> None:
    lock = _locks.pop(part, None)
    if lock is not None:
        os.close(lock)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Context in which other saves into this directory wait, where the system has locks."""
    lock = _lock(directory, wait=True)
    try:
        yield
    finally:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also in processes that were forked meanwhile
            os.close(lock)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Context in which an OSError names the checkpoint at `path`, in place of a file in it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not error.filename2:
            error.filename = str(path)
        raise


def commit_path(part: Path, path: Path) -> None:
    """Rename a complete checkpoint to its path.

    If either is a directory, the former checkpoint is first set aside by a rename, and deleted last.
    """
    if not part.is_dir() and not path.is_dir():
        with freed_later(path):
            part.replace(path)
        _unlock(part)
        flush_directory(path.parent)
        return
    aside = part.with_suffix(".old")
    with directory_lock(path.parent):  # another save to this path renames it meanwhile
        if part in _modes:
            _apply_modes(part, path)
        if os.path.lexists(path):
            path.rename(aside)
        try:
            part.rename(path)
        except BaseException:
            if os.path.lexists(aside):
                aside.rename(path)
            raise
        _unlock(part)
        flush_directory(path.parent)
        before = _leftovers(path, "old")  # also those of killed saves
    for rest in before:
        with freed_later(rest):
            remove(rest)
        if rest.is_dir():  # a network file system kept the names of open files, or no descriptor was left
            wait_until_freed()
            remove(rest)


def remove(path: Path) -> None:
    """Delete a file or directory, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    _unlock(path)
    _modes.pop(path, None)


def flush_directory(directory: Path) -> None:
    """Flush the entries of a directory to the disk. Systems that cannot open a directory need no flush."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _leftovers(path: Path, suffix: str) -> list[Path]:
    """Return the temporary paths of saves to `path`: "old", former checkpoints; "part", incomplete ones."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.{suffix}")
    try:
        return [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]
    except OSError:
        return []
