"""What makes a checkpoint file verifiable: a digest of all its bytes, in the archive's own comment.

torch writes ZIP archives, and a ZIP archive ends with a comment, whose length stands in the last two bytes of
an archive that has none. `torch.load` and every unzipper pass over it. So the digest travels in the file that
it is of, and one rename puts both into place. CRC-32 finds every flip of one bit and all but one in 4 billion
of other damages; it says nothing of who wrote the file.
"""

from __future__ import annotations

import io
import json
import threading
import zlib
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import DamagedCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabric.core.types import PathLike

_OPEN, _CLOSE = b"\x93fabric-seal\x00", b"\x00fabric-seal\x93"
_ARCHIVE_END = b"PK\x05\x06"
_LENGTH = 2
"""Bytes at the end of an archive that say how long its comment is."""
_COMMENT = 65_535
_LARGE = 1 << 20
_PIECE = 4 << 20


class SealedWriter(io.BufferedWriter):
    """A file for `torch.save`, which takes a digest of what passes while it is written, and adds it.

    Args:
        file: Open for writing, with bytes. Never read or sought in.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(_Digest(file), _LARGE)  # torch writes an archive in many small pieces

    def seal(self, facts: Mapping[str, Any]) -> None:
        """Write the end. `facts` are kept with the digest, and read by `check`."""
        self.flush()
        self.raw.seal(facts)  # type: ignore[attr-defined]


class _Digest(io.RawIOBase):
    def __init__(self, file: Any) -> None:
        self._file = file
        self._tail = b""  # the last bytes so far: at the end they make room for the comment
        self._crc = self._size = 0
        self._failed = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        length = len(data)
        if self._failed:  # whoever closes the writer after an error has it flushed once more
            return length
        if length < _LARGE:
            data = memoryview(self._tail + bytes(data))
        else:
            self._put(self._tail)
        self._put(data[:-_LENGTH])
        self._tail = bytes(data[-_LENGTH:])
        return length

    def seal(self, facts: Mapping[str, Any]) -> None:
        told = {"format": 1, "torch": torch.__version__, **facts, "size": self._size, "crc32": self._crc}
        text = json.dumps(told).encode()
        comment = b"%s%08x%s%s" % (_OPEN, zlib.crc32(text), text, _CLOSE)
        write_all(self._file, len(comment).to_bytes(_LENGTH, "little") + comment)

    def _put(self, data: Any) -> None:
        beside = threading.Thread(target=self._digest, args=(data,))  # neither holds the interpreter
        beside.start()
        try:
            write_all(self._file, data)
        except BaseException:
            self._failed = True
            raise
        finally:
            beside.join()

    def _digest(self, data: Any) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._size += len(data)


def write_all(file: Any, data: Any) -> None:
    """Write all of `data` to a file that may take a part at a time (2 GiB is what Linux takes at once)."""
    while len(data):
        done = file.write(data)
        data = data[len(data) if done is None else done :]


def check(file: Any, path: PathLike) -> dict[str, Any] | None:
    """What was said when the file was sealed; None: it has no seal, as those of plain `torch.save`.

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
            raise DamagedCheckpointError(f"{path} is damaged: its end is.")
        return None
    text = end[at + len(_OPEN) + 8 : -len(_CLOSE)]
    whole = (
        at >= _LENGTH and end.endswith(_CLOSE) and end[at + len(_OPEN) :][:8] == b"%08x" % zlib.crc32(text)
    )
    if not whole or end[at - _LENGTH : at] != (len(end) - at).to_bytes(_LENGTH, "little"):
        raise DamagedCheckpointError(f"{path} is damaged: its end is.")
    told: dict[str, Any] = json.loads(text)
    content = size - len(end) + at - _LENGTH
    file.seek(0)
    if content != told["size"] or crc_of(file, content) != told["crc32"]:
        raise DamagedCheckpointError(
            f"{path} is damaged: its bytes are not those that were written. Load another checkpoint, or copy "
            "this one anew from where it came."
        )
    return told


def crc_of(file: Any, length: int, crc: int = 0) -> int:
    """The digest of the next `length` bytes, read by pieces, after that of others; -1: there are fewer."""
    piece = memoryview(bytearray(min(length, _PIECE)))
    while length and (count := file.readinto(piece[: min(length, _PIECE)])):
        crc = zlib.crc32(piece[:count], crc)
        length -= count
    return -1 if length else crc
