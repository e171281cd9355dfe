"""What makes a checkpoint file verifiable: a digest of all its bytes, in the archive's own comment.

torch writes ZIP archives, and a ZIP archive ends with a comment, whose length stands in the last two bytes of
an archive that has none. `torch.load` and every unzipper pass over it. So the digest travels in the file that
it is of, and one rename puts both into place.
"""

from __future__ import annotations

import io
import json
import zlib
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import DamagedCheckpointError
from fabric.plugins.io.digest import LARGE, DigestWriter, crc_of, write_all

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabric.core.types import PathLike

_OPEN, _CLOSE = b"\x93fabric-seal\x00", b"\x00fabric-seal\x93"
_ARCHIVE_END = b"PK\x05\x06"
_LENGTH = 2
"""Bytes at the end of an archive that say how long its comment is."""
_COMMENT = 65_535


class SealedWriter(io.BufferedWriter):
    """A file for `torch.save`, which takes a digest of what passes while it is written, and adds it.

    Args:
        file: Open for writing, with bytes. Never read or sought in.
    """

    def __init__(self, file: Any) -> None:
        self._sealing = _Sealing(file)
        super().__init__(self._sealing, LARGE)  # torch writes an archive in many small pieces

    def seal(self, facts: Mapping[str, Any]) -> None:
        """Write the end. `facts` are kept with the digest, and read by `check`."""
        self.flush()
        self._sealing.seal(facts)

    def give_up(self) -> None:
        """Forget the buffer, which would go to a file that is closed by the time this is collected."""
        self._sealing._failed = True


class _Sealing(DigestWriter):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._tail = b""  # the last bytes so far: at the end they make room for the comment

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        length = len(data)
        if length < LARGE:
            data = memoryview(self._tail + bytes(data))
        else:
            super().write(self._tail)
        super().write(data[:-_LENGTH])
        self._tail = bytes(data[-_LENGTH:])
        return length

    def seal(self, facts: Mapping[str, Any]) -> None:
        told = {"format": 1, "torch": torch.__version__, **facts, "size": self.size, "crc32": self.crc}
        text = json.dumps(told).encode()
        comment = b"%s%08x%s%s" % (_OPEN, zlib.crc32(text), text, _CLOSE)
        write_all(self._file, len(comment).to_bytes(_LENGTH, "little") + comment)


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
