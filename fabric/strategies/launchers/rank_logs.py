"""`RankLogs`: what each rank prints, in files of its own and on the terminal behind its rank. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from typing import TYPE_CHECKING, BinaryIO, TextIO

from fabric.core.errors import ConfigurationError
from fabric.utilities.messages import say

if TYPE_CHECKING:
    from pathlib import Path

_LINE = re.compile(rb"[^\r\n]*[\r\n]+")  # a progress bar returns to the start of its line
_CHUNK = 65536
_DRAIN_S = 2.0
"""Seconds for what is under way after a rank's end; a subprocess of it may hold the pipe open for longer."""


class RankLogs:
    """Copies each rank's stdout and stderr to `rank0.out`, `rank0.err`, ... and to ours, line by line.

    What was in the files stays: a job that is started again writes on.

    Args:
        directory: Made if it is missing.

    Raises:
        ConfigurationError: It cannot be made, or not be written to.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pumps: list[threading.Thread] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def streams(self, rank: int) -> tuple[int, int]:
        """Descriptors for a rank's stdout and stderr; the caller closes them once the rank has them."""
        return self._pump(rank, "out", sys.stdout), self._pump(rank, "err", sys.stderr)

    def note(self, rank: int, text: str) -> None:
        """Write into a rank's file what it said to the supervisor and not to the terminal."""
        with contextlib.suppress(OSError), (self.directory / f"rank{rank}.err").open("a") as file:
            file.write(text)

    def start(self) -> None:
        """Begin to copy, once all ranks have been started."""
        for pump in self._pumps:
            pump.start()

    def close(self) -> None:
        """Wait until all is copied that the ranks have written."""
        for pump in self._pumps:
            if pump.ident is not None:
                pump.join(_DRAIN_S)

    def _pump(self, rank: int, kind: str, terminal: TextIO) -> int:
        try:
            file = (self.directory / f"rank{rank}.{kind}").open("ab", buffering=0)
        except OSError as error:
            raise self._unusable(error) from error
        reader, writer = os.pipe()
        self._pumps.append(
            threading.Thread(
                target=_copy,
                args=(reader, file, terminal, f"[rank {rank}] ".encode()),
                daemon=True,
                name="fabric-log",
            )
        )
        return writer

    def _unusable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"--log-dir {self.directory} cannot be written to: {error}. Write a directory that can."
        )


def _copy(reader: int, file: BinaryIO, terminal: TextIO, prefix: bytes) -> None:
    # To the end, whatever fails: a rank whose pipe nobody reads fails at its next print.
    rest, writes = b"", True
    with file, os.fdopen(reader, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK):
            try:
                if writes:
                    file.write(chunk)
            except OSError as error:
                writes = False
                say(f"{file.name} ends here: {error}")
            rest += chunk
            end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
            lines, rest = _LINE.findall(rest[:end]), rest[end:]
            if len(rest) > _CHUNK:  # no line
                lines, rest = [*lines, rest + b"\n"], b""
            _show(terminal, [prefix + line for line in lines])
    if rest:
        _show(terminal, [prefix + rest + b"\n"])


def _show(terminal: TextIO, lines: list[bytes]) -> None:
    # One write for all: lines of several ranks stay lines.
    text = b"".join(lines).decode(errors="replace")
    with contextlib.suppress(OSError, ValueError):  # the terminal has gone
        encoding = terminal.encoding or "utf-8"
        terminal.write(text.encode(encoding, "backslashreplace").decode(encoding))
        terminal.flush()
