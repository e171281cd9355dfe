"""The directory of a sharded checkpoint on a disk: found, checked against its manifest, put in place.

`fabric.json` is the manifest, written last: sizes and digests of all other files. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fabric.core.errors import DamagedCheckpointError, UsageError
from fabric.plugins.io.digest import crc_of
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
FORMAT = 1
_SHORT = 100
"""Letters of a name that stand in names beside it, which must not get too long."""
_held: dict[Path, int | None] = {}
"""What this process writes beside paths, and the descriptors that lock it; None: there are no locks."""


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


def digest(file: Path) -> dict[str, Any]:
    """Size and digest of a file, as the manifest has them."""
    size = file.stat().st_size
    with file.open("rb", buffering=0) as stream:
        return {"size": size, "crc32": crc_of(stream, size)}


def write_manifest(directory: Path, files: dict[str, Any], **facts: Any) -> None:
    """Write the manifest, and flush it and the directory to the disk."""
    facts = {"format": FORMAT, **facts, "files": dict(sorted(files.items()))}
    with (directory / MANIFEST).open("x") as stream:
        stream.write(_render(facts))
        stream.flush()
        os.fsync(stream.fileno())
    flush_directory(directory)


def check(directory: Path, place: int, ranks: int) -> None:
    """Check every `ranks`-th file of a checkpoint, from number `place` on; without manifest there is nothing.

    Raises:
        DamagedCheckpointError: A file is missing, or not what was written; the message names it.
    """
    if not (directory / MANIFEST).exists():  # of torch alone, else the reader knows
        return
    files = _read_manifest(directory)["files"]
    for name in sorted(files)[place::ranks]:
        wrong = _differs(directory / name, files[name])
        if wrong:
            raise damaged(directory, f"{name} {wrong}")


def damaged(directory: Path, wrong: str) -> DamagedCheckpointError:
    """The error of a checkpoint with a file that is not what was written."""
    return DamagedCheckpointError(f"The checkpoint {directory} is damaged: {wrong}. Load an older one.")


def begin(path: Path) -> Path:
    """A new directory beside `path`, to be written into: until `put_in_place`, or `remove`.

    Raises:
        IsADirectoryError: At `path` is a directory with files that no save has written.
        OSError: The directory cannot be made.
    """
    with _alone_in(path.parent):
        refuse_foreign(path)
    if path.exists() and not (path.is_dir() or path.is_file()):
        raise FileExistsError(f"{path} is neither a file nor a directory that a checkpoint could replace.")
    return _part_of(path, directory=True)


@contextmanager
def new_beside(path: Path) -> Iterator[Path]:
    """A new file beside `path`, for what will have its name; if this fails, it is removed.

    Raises:
        OSError: It cannot be made.
    """
    part = _part_of(path, directory=False)
    try:
        yield part
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        _let_go(part)


def _part_of(path: Path, directory: bool) -> Path:
    """A new file or directory beside `path`, locked while this process lives, or lets it go.

    Those of saves to `path` that nobody has locked were killed, and are removed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"{path} cannot be written: {path.parent} is a file.") from None
    for left in _beside(path, "part"):
        with suppress(OSError):
            lock = _lock(left)
            if lock is not None:
                remove(left)
                os.close(lock)
    while True:
        part = path.with_name(f".{_short(path)}.{secrets.token_hex(4)}.part")
        if directory:
            part.mkdir()
        else:
            part.touch(exist_ok=False)
        try:
            _held[part] = _lock(part)
        except (BlockingIOError, FileNotFoundError):
            continue  # another save takes it for a left one, since it was not locked yet
        if part.exists():
            return part
        _let_go(part)


def _lock(path: Path) -> int | None:
    """Lock a file or directory until the descriptor is closed; None: there are no locks here.

    Raises:
        BlockingIOError: It is locked.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _let_go(part: Path) -> None:
    lock = _held.pop(part, None)
    if lock is not None:
        os.close(lock)


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Let other saves into this directory wait, where there are locks."""
    descriptor = None
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY) if fcntl is not None else None
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also in processes that were forked meanwhile
            os.close(descriptor)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of a file, or without one, name the checkpoint at `path`, of which it would be a part."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not error.filename2:
            error.filename = str(path)
        raise


def refuse_foreign(path: Path) -> None:
    """Raise IsADirectoryError if at `path` is a directory with files that no save has written."""
    if not path.is_dir():
        return
    others = [entry.name for entry in path.iterdir() if not _is_ours(entry)]
    if others and (path / MANIFEST).is_file():  # an engine's files have names of their own
        written = {name.partition("/")[0] for name in _read_manifest(path)["files"]}
        others = [name for name in others if name not in written]
    if others:
        raise IsADirectoryError(
            f"{path} is a directory with {others[0]!r} in it, which a new checkpoint would delete. Give the "
            f"checkpoint a name of its own, for example {path / 'checkpoint'}."
        )


def put_in_place(part: Path, path: Path) -> None:
    """Give a complete checkpoint its name; what had it before is set aside first, and deleted last."""
    aside = part.with_suffix(".old")
    with _alone_in(path.parent):
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
    """What saves to `path` have left beside it: "old", set aside; "part", not complete."""
    pattern = re.compile(rf"\.{re.escape(_short(path))}\.[0-9a-f]{{8}}\.{suffix}")
    try:
        return [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]
    except OSError:
        return []


def _short(path: Path) -> str:
    name = path.name
    if len(name) <= _SHORT:
        return name
    return f"{name[:_SHORT]}~{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"  # else two could be one


def _is_ours(entry: Path) -> bool:
    return entry.name in (MANIFEST, METADATA) or entry.suffix == ".distcp"


def _render(facts: dict[str, Any]) -> str:
    """The manifest's text, with a digest of itself."""
    code = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    return json.dumps({**facts, "crc32": code}, indent=1) + "\n"


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        text = (directory / MANIFEST).read_text()
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


def _differs(file: Path, said: dict[str, Any]) -> str:
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != said["size"]:
        return f"has {size} bytes instead of {said['size']}"
    return "" if digest(file) == said else "has changed"
