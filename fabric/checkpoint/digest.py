"""CRC-32 of files, taken while they are written or read; and the seal, which keeps that of a file in it.

It finds every flip of one bit and all but one in 4 billion of other damages; it says nothing of who wrote a
file.

torch writes ZIP archives, and a ZIP archive ends with a comment, whose length stands in the last two bytes of
an archive that has none. `torch.load` and every unzipper pass over it. So the digest travels in the file that
it is of, and one rename puts both into place.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.checkpoint.crc import Crc32, crc_of_range, joined
from fabric.core.cores import usable_cores
from fabric.core.errors import DamagedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fabric.core.types import PathLike

LARGE = 1 << 20
_OPEN, _CLOSE = b"\x93fabric-seal\x00", b"\x00fabric-seal\x93"
_ARCHIVE_END = b"PK\x05\x06"
_LENGTH = 2
"""Bytes at the end of an archive that say how long its comment is."""
_COMMENT = 65_535
_THREADS = 4
"""At most so many read a file at once: each has 4.3 MB of memory."""


class Sealed(NamedTuple):
    """A range of a file, and the CRC-32 that it was written with."""

    file: Path
    start: int
    length: int
    crc: int
    error: DamagedCheckpointError
    """Raised if it has another one."""


class DigestWriter:
    """A file for `torch.save`, which takes a digest of what is written. The last bytes are held back.

    Args:
        file: Open for writing, with bytes. Never read or sought in.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._held, self._crc = file, bytearray(), Crc32()

    @property
    def crc(self) -> int:
        """The digest of what is written."""
        return self._crc.value

    @property
    def size(self) -> int:
        """The number of bytes that are written."""
        return self._crc.size

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self.size + len(self._held)

    def write(self, data: Any) -> int:
        """Write all of `data`; in large pieces, since torch writes an archive in many small ones."""
        data = memoryview(data).cast("B")
        if len(data) < LARGE:
            self._held += data
        else:
            self._put(self._held)
            self._put(data[:-_LENGTH])
            self._held = bytearray(data[-_LENGTH:])
        if len(self._held) > LARGE:
            self._put(self._held[:-_LENGTH])
            del self._held[:-_LENGTH]
        return len(data)

    def flush(self) -> None:
        """Nothing: what is held back may get another end."""

    def finish(self) -> None:
        """Write the rest."""
        self._put(self._held)

    def seal(self, facts: Mapping[str, Any]) -> None:
        """Write the rest of a ZIP archive, with a comment: the digest, and `facts`, for `read_seal`."""
        self._put(self._held[:-_LENGTH])
        told = {"format": 1, "torch": torch.__version__, **facts, "size": self.size, "crc32": self.crc}
        text = json.dumps(told).encode()
        comment = b"%s%08x%s%s" % (_OPEN, zlib.crc32(text), text, _CLOSE)
        write_all(self._file, len(comment).to_bytes(_LENGTH, "little") + comment)

    def _put(self, data: Any) -> None:
        for start in range(0, len(data), LARGE):
            piece = data[start : start + LARGE]
            self._crc.update(piece)
            write_all(self._file, piece)  # out of the processor's cache


def write_all(file: Any, data: Any) -> None:
    """Write all of `data` to a file that may take a part at a time (2 GiB is what Linux takes at once).

    The disk begins with it at once (on Linux), so that the flush at the end waits for less.
    """
    length = len(data)
    while len(data):
        done = file.write(data)
        data = data[len(data) if done is None else done :]
    with suppress(OSError, AttributeError):  # no file of a disk; not Linux
        os.posix_fadvise(file.fileno(), file.tell() - length, length, os.POSIX_FADV_DONTNEED)


def digest_share(ranges: Sequence[Sealed], place: int, ranks: int, local_ranks: int = 1) -> list[int]:
    """Return the CRC-32 of each range's part that one of several ranks reads; -1: the file is too short.

    Args:
        ranges: Alike on all of these ranks.
        place: Which of them this is.
        ranks: Their number.
        local_ranks: Ranks of this host that may be reading at the same time. They share its cores.
    """
    threads = min(_THREADS, max(1, usable_cores() // local_ranks))
    bounds = [_bounds(each, place, ranks) for each in ranges]
    return [
        crc_of_range(each.file, each.start + first, last - first, threads)
        for each, (first, last) in zip(ranges, bounds, strict=True)
    ]


def identity(ranges: Sequence[Sealed]) -> int:
    """Return a number that is equal on ranks of one host whose ranges are of the same files."""
    files = [(each.file.resolve(), each.file.stat(), each) for each in ranges]
    told = [(str(path), of.st_dev, of.st_ino, *each[1:4]) for path, of, each in files]
    return zlib.crc32(repr(told).encode())


def verify(ranges: Sequence[Sealed], shares: Sequence[Sequence[int]] | None = None) -> None:
    """Compare files with what was written.

    Args:
        ranges: What to compare.
        shares: Results of `digest_share`, by place; None: all is read here.

    Raises:
        DamagedCheckpointError: That of the first range which has changed.
    """
    shares = [digest_share(ranges, 0, 1)] if shares is None else shares
    for number, each in enumerate(ranges):
        crcs, total = [share[number] for share in shares], 0
        for place, crc in enumerate(crcs):
            first, last = _bounds(each, place, len(shares))
            total = joined(total, crc, last - first)
        if -1 in crcs or total != each.crc:
            raise each.error


def _bounds(each: Sealed, place: int, ranks: int) -> tuple[int, int]:
    return each.length * place // ranks, each.length * (place + 1) // ranks


CHANGED = "its bytes are not those that were written"


def damaged(path: PathLike, why: str) -> DamagedCheckpointError:
    """The error of a checkpoint that is not what was written."""
    return DamagedCheckpointError(
        f"{path} is damaged: {why}. Load another checkpoint, or copy this one anew from where it came."
    )


def read_seal(file: Any, path: PathLike) -> dict[str, Any] | None:
    """Return the facts of a file's seal, with `size` and `crc32` of the bytes before it, which are to be
    verified; None: no seal, as after plain `torch.save`.

    Args:
        file: Open for reading, with bytes. Only its end is read.
        path: How the user calls it.

    Raises:
        DamagedCheckpointError: The seal is not what was written, or another number of bytes is before it.
    """
    size = file.seek(0, 2)
    file.seek(max(0, size - _COMMENT - _LENGTH))
    end = file.read()
    at = end.rfind(_OPEN)
    if at < 0:
        archive = end.rfind(_ARCHIVE_END)
        comment = int.from_bytes(end[archive + 20 : archive + 22], "little")
        if _CLOSE in end or (archive >= 0 and len(end) - archive - 22 != comment):
            raise damaged(path, "its end is")
        return None
    text = end[at + len(_OPEN) + 8 : -len(_CLOSE)]
    whole = (
        at >= _LENGTH and end.endswith(_CLOSE) and end[at + len(_OPEN) :][:8] == b"%08x" % zlib.crc32(text)
    )
    if not whole or end[at - _LENGTH : at] != (len(end) - at).to_bytes(_LENGTH, "little"):
        raise damaged(path, "its end is")
    told: dict[str, Any] = json.loads(text)
    content = size - len(end) + at - _LENGTH
    if content != told["size"]:
        raise damaged(path, CHANGED)
    return told
