"""The directory of a sharded checkpoint on a disk: found, checked against its manifest, put in place.

`fabric.json` is the manifest, written last: sizes and digests of all other files. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from fabric.core.errors import DamagedCheckpointError, UsageError
from fabric.utilities.cloud_io import local_path

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
PIECE = 16 << 20
"""Bytes of a file that one digest is of."""
_READ = 1 << 20
_SHORT = 100
"""Letters of a name that stand in names beside it, which must not get too long."""


def present(path: PathLike) -> PathLike:
    """`path`, or what a save that was killed between its two renames has left of the checkpoint there."""
    local = local_path(path)
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
    """Size and digests of a file, as the manifest has them."""
    sums: list[int] = []
    size, buffer = 0, memoryview(bytearray(_READ))
    with file.open("rb", buffering=0) as stream:
        while length := stream.readinto(buffer[: PIECE - size % PIECE]):
            if size % PIECE == 0:
                sums.append(0)
            sums[-1] = zlib.crc32(buffer[:length], sums[-1])
            size += length
    return {"size": size, "crc32": sums}


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
    """A new directory beside `path`, to be written into.

    Raises:
        IsADirectoryError: At `path` is a directory with files that no save has written.
        OSError: The directory cannot be made.
    """
    refuse_foreign(path)
    if path.exists() and not (path.is_dir() or path.is_file()):
        raise FileExistsError(f"{path} is neither a file nor a directory that a checkpoint could replace.")
    part = part_beside(path)
    part.mkdir()
    return part


def part_beside(path: Path) -> Path:
    """A name beside `path` for what will have its name; the directory is made.

    Raises:
        NotADirectoryError: It cannot be: there is a file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"{path} cannot be written: {path.parent} is a file.") from None
    return path.with_name(f".{path.name[:_SHORT]}.{secrets.token_hex(4)}.part")


@contextmanager
def new_beside(path: Path) -> Iterator[Path]:
    """A new file beside `path`, for what will have its name. It is locked as long as this context, or the
    process, lives: those of saves to `path` that are not, were killed, and are removed.

    Raises:
        OSError: It cannot be made.
    """
    for left in _beside(path, "part"):
        with suppress(OSError), left.open("rb+") as file:
            if _lock(file):
                left.unlink()
    part = part_beside(path)
    with part.open("xb") as file:
        if fcntl is None:
            file.close()
        with suppress(OSError):  # a file system without locks: nobody can, and nothing is removed
            _lock(file)
        if part.exists():
            yield part
            return
    with new_beside(path) as part:  # another save has looked at it before it was locked
        yield part


def _lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; False: there are no locks."""
    if fcntl is None:
        return False
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


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
    others = [entry.name for entry in path.iterdir() if not _is_ours(entry)] if path.is_dir() else []
    if others:
        raise IsADirectoryError(
            f"{path} is a directory with {others[0]!r} in it, which a new checkpoint would delete. Give the "
            f"checkpoint a name of its own, for example {path / 'checkpoint'}."
        )


def put_in_place(part: Path, path: Path) -> None:
    """Give a complete checkpoint its name; what had it before is set aside first, and deleted last."""
    aside = part.with_suffix(".old")
    if os.path.lexists(path):
        path.rename(aside)
    try:
        part.rename(path)
    except BaseException:
        if os.path.lexists(aside):
            aside.rename(path)
        raise
    flush_directory(path.parent)
    for rest in [*_beside(path, "old"), *[other for other in _beside(path, "part") if other.is_dir()]]:
        remove(rest)  # also of saves that were killed


def remove(path: Path) -> None:
    """Delete a file or directory, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
    pattern = re.compile(rf"\.{re.escape(path.name[:_SHORT])}\.[0-9a-f]{{8}}\.{suffix}")
    try:
        return [entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name)]
    except OSError:
        return []


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
    pairs = zip(digest(file)["crc32"], said["crc32"], strict=True)
    changed = [f"{i * PIECE}" for i, (now, then) in enumerate(pairs) if now != then]
    return f"has changed in the {PIECE} bytes from {', '.join(changed[:3])} on" if changed else ""
