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
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import DamagedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabric.core.types import PathLike

LARGE = 1 << 20
_PIECE = 4 << 20
_OPEN, _CLOSE = b"\x93fabric-seal\x00", b"\x00fabric-seal\x93"
_ARCHIVE_END = b"PK\x05\x06"
_LENGTH = 2
"""Bytes at the end of an archive that say how long its comment is."""
_COMMENT = 65_535


class DigestWriter:
    """A file for `torch.save`, which takes a digest of what is written. The last bytes are held back.

    Args:
        file: Open for writing, with bytes. Never read or sought in.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._held = file, bytearray()
        self.crc = self.size = 0

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
        """Write the rest of a ZIP archive, with a comment: the digest, and `facts`, which `check` reads."""
        self._put(self._held[:-_LENGTH])
        told = {"format": 1, "torch": torch.__version__, **facts, "size": self.size, "crc32": self.crc}
        text = json.dumps(told).encode()
        comment = b"%s%08x%s%s" % (_OPEN, zlib.crc32(text), text, _CLOSE)
        write_all(self._file, len(comment).to_bytes(_LENGTH, "little") + comment)

    def _put(self, data: Any) -> None:
        for start in range(0, len(data), LARGE):
            piece = data[start : start + LARGE]
            self.crc = zlib.crc32(piece, self.crc)
            write_all(self._file, piece)  # out of the processor's cache
        self.size += len(data)


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


def crc_of(file: Any, length: int, crc: int = 0) -> int:
    """The digest of the next `length` bytes, read by pieces, after that of others; -1: there are fewer."""
    piece = memoryview(bytearray(min(length, _PIECE)))
    while length and (count := file.readinto(piece[: min(length, _PIECE)])):
        crc = zlib.crc32(piece[:count], crc)
        length -= count
    return -1 if length else crc


def damaged(path: PathLike, why: str) -> DamagedCheckpointError:
    """The error of a checkpoint that is not what was written."""
    return DamagedCheckpointError(
        f"{path} is damaged: {why}. Load another checkpoint, or copy this one anew from where it came."
    )


def check(file: Any, path: PathLike) -> dict[str, Any] | None:
    """Check a file against its seal and return the sealed facts; None: no seal, as after plain `torch.save`.

    Args:
        file: Open for reading, with bytes. Read from its start to its end, by pieces.
        path: How the user calls it.

    Raises:
        DamagedCheckpointError: It is not what was written.
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
    file.seek(0)
    if content != told["size"] or crc_of(file, content) != told["crc32"]:
        raise damaged(path, "its bytes are not those that were written")
    return told
