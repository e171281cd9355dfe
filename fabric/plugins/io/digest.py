"""CRC-32 of files, taken while they are written or read. Nothing here needs torch.

It finds every flip of one bit and all but one in 4 billion of other damages; it says nothing of who wrote a
file.
"""

from __future__ import annotations

import io
import os
import zlib
from contextlib import suppress
from typing import Any

LARGE = 1 << 20
_PIECE = 4 << 20


class DigestWriter(io.RawIOBase):
    """Writes to a file, and takes a digest of what passes.

    Args:
        file: Open for writing, with bytes. Never read or sought in.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.crc = self.size = 0
        self._failed = False

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor of the file."""
        number: int = self._file.fileno()
        return number

    def tell(self) -> int:
        """How many bytes were written."""
        return self.size

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        data = memoryview(data).cast("B")
        if self._failed:  # whoever closes a buffer after an error has it flushed once more
            return len(data)
        self._failed = True
        for start in range(0, len(data), LARGE):
            piece = data[start : start + LARGE]
            self.crc = zlib.crc32(piece, self.crc)
            write_all(self._file, piece)  # out of the processor's cache
        self._failed = False
        self.size += len(data)
        return len(data)


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
