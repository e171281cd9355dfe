"""CRC-32 of files, computed while they are written or read; and the seal, which stores it in the file.

It detects every flip of one bit, and all but one in 4 billion of other changes. It authenticates nothing.

torch writes ZIP archives. A ZIP archive ends with a comment; the two bytes before it are its length.
`torch.load` and every unzipper ignore it. So the digest is in the file itself, and one rename commits both.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.checkpoint.crc import Crc32, combine_crcs, crc_of_range
from fabric.core.cores import usable_cores
from fabric.core.errors import DamagedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fabric.core.types import PathLike

LARGE = 1 << 20
_BUFFER = 1 << 17
"""Bytes that a `DigestWriter` joins. Pieces of half of it are written without a copy."""
_WRITE_BACK = 8 << 20
_OPEN, _CLOSE = b"\x93fabric-seal\x00", b"\x00fabric-seal\x93"
_ARCHIVE_END = b"PK\x05\x06"
_LENGTH = 2
"""Bytes at the end of an archive that hold the length of its comment."""
_COMMENT = 65_535
_THREADS = 4
"""Largest number of threads that read a file at once. Each needs 4.3 MB of memory."""


class Sealed(NamedTuple):
    """A range of a file, and the CRC-32 that it was written with."""

    file: Path
    start: int
    length: int
    crc: int
    error: DamagedCheckpointError
    """Raised if the bytes have another CRC-32."""


class DigestWriter:
    """A file for `torch.save` that computes a digest of the written bytes. The last bytes are buffered.

    Args:
        file: Open for writing, with bytes. Never read or sought in.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._crc = file, Crc32()
        self._buffer, self._held = memoryview(bytearray(_BUFFER)), 0

    @property
    def crc(self) -> int:
        """The digest of the bytes written so far."""
        return self._crc.value

    @property
    def size(self) -> int:
        """The number of bytes that are written."""
        return self._crc.size

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self.size + self._held

    def write(self, data: Any) -> int:
        """Write all of `data`. Small pieces are joined, since torch writes an archive in many of them."""
        data = memoryview(data).cast("B")
        length = len(data)
        if self._held + length > _BUFFER:
            self._put_buffer(keep=max(0, _LENGTH - length))
            if length > _BUFFER // 2:
                self._put(data[:-_LENGTH])
                data = data[-_LENGTH:]
        end = self._held + len(data)
        self._buffer[self._held : end] = data
        self._held = end
        return length

    def flush(self) -> None:
        """Do nothing: the end of the buffered bytes may still be replaced."""

    def finish(self) -> None:
        """Write the buffered bytes."""
        self._put_buffer()

    def seal(self, facts: Mapping[str, Any]) -> None:
        """Write the rest of a ZIP archive, with a comment: the digest, and `facts`, for `read_seal`."""
        self._put_buffer(keep=_LENGTH)
        seal = {"format": 1, "torch": torch.__version__, **facts, "size": self.size, "crc32": self.crc}
        text = json.dumps(seal).encode()
        comment = b"%s%08x%s%s" % (_OPEN, zlib.crc32(text), text, _CLOSE)
        write_all(self._file, len(comment).to_bytes(_LENGTH, "little") + comment)

    def _put_buffer(self, keep: int = 0) -> None:
        """Write the buffered bytes but the last `keep`."""
        first = max(0, self._held - keep)
        rest = bytes(self._buffer[first : self._held])
        self._put(self._buffer[:first])
        self._buffer[: len(rest)] = rest
        self._held = len(rest)

    def _put(self, data: Any) -> None:
        for start in range(0, len(data), LARGE):
            piece = data[start : start + LARGE]
            self._crc.update(piece)
            write_all(self._file, piece)  # out of the processor's cache


def write_all(file: Any, data: Any) -> None:
    """Write all of `data` to a file that may accept a part at a time (Linux accepts up to 2 GiB).

    On Linux the kernel starts the write-back of each 8 MiB at once, so that the final flush is shorter.
    """
    length = len(data)
    while len(data):
        done = file.write(data)
        data = data[len(data) if done is None else done :]
    with suppress(OSError, AttributeError):  # no file of a disk; not Linux
        end = file.tell()
        start = (end - length) // _WRITE_BACK * _WRITE_BACK
        if end - start >= _WRITE_BACK:
            os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def digest_share(ranges: Sequence[Sealed], place: int, ranks: int, local_ranks: int = 1) -> list[int]:
    """Return the CRC-32 of this rank's part of each range; -1: the file is too short.

    Args:
        ranges: The ranges, equal on all of these ranks.
        place: Index of this rank among them.
        ranks: The number of ranks that share the work.
        local_ranks: Ranks of this host that may be reading at the same time. They share its cores.
    """
    threads = min(_THREADS, max(1, usable_cores() // local_ranks))
    bounds = [_bounds(each, place, ranks) for each in ranges]
    return [
        crc_of_range(each.file, each.start + first, last - first, threads)
        for each, (first, last) in zip(ranges, bounds, strict=True)
    ]


def identity(ranges: Sequence[Sealed]) -> int:
    """Return a number that is equal on ranks of one host with the same ranges of the same files."""
    files = [(each.file.resolve(), each.file.stat(), each) for each in ranges]
    keys = [(str(path), of.st_dev, of.st_ino, *each[1:4]) for path, of, each in files]
    return zlib.crc32(repr(keys).encode())


def verify(ranges: Sequence[Sealed], shares: Sequence[Sequence[int]] | None = None) -> None:
    """Compare files with the digests of the data that were written.

    Args:
        ranges: The ranges to compare.
        shares: Results of `digest_share`, by place; None: this process reads all.

    Raises:
        DamagedCheckpointError: The `error` of the first range that has changed.
    """
    shares = [digest_share(ranges, 0, 1)] if shares is None else shares
    for number, each in enumerate(ranges):
        crcs, total = [share[number] for share in shares], 0
        for place, crc in enumerate(crcs):
            first, last = _bounds(each, place, len(shares))
            total = combine_crcs(total, crc, last - first)
        if -1 in crcs or total != each.crc:
            raise each.error


def _bounds(each: Sealed, place: int, ranks: int) -> tuple[int, int]:
    return each.length * place // ranks, each.length * (place + 1) // ranks


CHANGED = "its bytes are not those that were written"


def damaged(path: PathLike, why: str) -> DamagedCheckpointError:
    """Return the error for a checkpoint whose content was changed, or is incomplete."""
    return DamagedCheckpointError(
        f"{path} is damaged: {why}. Load another checkpoint, or copy this one from its source again."
    )


def read_seal(file: Any, path: PathLike) -> dict[str, Any] | None:
    """Return the entries of a file's seal; None: no seal, as after plain `torch.save`.

    `size` and `crc32` describe the bytes before the seal, which the caller must verify.

    Args:
        file: Open for reading, with bytes. Only its end is read.
        path: The name in errors.

    Raises:
        DamagedCheckpointError: The seal was changed, or the number of bytes before it differs.
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
    seal: dict[str, Any] = json.loads(text)
    content = size - len(end) + at - _LENGTH
    if content != seal["size"]:
        raise damaged(path, CHANGED)
    return seal
