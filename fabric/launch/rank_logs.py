"""`RankLogs`: what each rank prints, line by line; with `--log-dir` behind its rank, and in files of its own.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, BinaryIO, TextIO

from fabric.core.errors import ConfigurationError
from fabric.core.messages import print_line

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK = 65536
_DRAIN_S = 2.0
"""Seconds for what is under way after a rank's end; a subprocess of it may hold the pipe open for longer."""


class RankLogs:
    """Copies each rank's stdout and stderr to ours, line by line, and to `rank0.out`, `rank0.err`, ...

    What was in the files stays: a job that is started again writes on.

    Args:
        directory: Of the files, made if it is missing; None: no files, and no rank in front of its lines.

    Raises:
        ConfigurationError: It cannot be made, or not be written to.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self._pumps: list[threading.Thread] = []
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unusable(directory, error) from error

    def streams(self, rank: int) -> tuple[int, int]:
        """Descriptors for a rank's stdout and stderr; the caller closes them once the rank has them."""
        return self._pump(rank, "out", sys.stdout), self._pump(rank, "err", sys.stderr)

    def note(self, rank: int, text: str) -> None:
        """Write into a rank's file what it said to the supervisor and not to the terminal."""
        with contextlib.suppress(OSError), self._file(rank, "err") or contextlib.nullcontext() as file:
            if file is not None:
                file.write(text.encode())

    def start(self) -> None:
        """Begin to copy, once all ranks have been started."""
        for pump in self._pumps:
            pump.start()

    def close(self) -> None:
        """Wait until all is copied that the ranks have written."""
        deadline = time.monotonic() + _DRAIN_S
        for pump in self._pumps:
            if pump.ident is not None:
                pump.join(max(0.0, deadline - time.monotonic()))

    def _file(self, rank: int, kind: str) -> BinaryIO | None:
        directory = self.directory
        return None if directory is None else (directory / f"rank{rank}.{kind}").open("ab", buffering=0)

    def _pump(self, rank: int, kind: str, terminal: TextIO) -> int:
        try:
            file = self._file(rank, kind)
        except OSError as error:
            raise _unusable(self.directory, error) from error
        prefix = b"" if file is None else f"[rank {rank}] ".encode()
        reader, writer = os.pipe()
        arguments = (reader, file, terminal, prefix)
        self._pumps.append(threading.Thread(target=_copy, args=arguments, daemon=True, name="fabric-log"))
        return writer


def _unusable(directory: Path | None, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"--log-dir {directory} cannot be written to: {error}. Write a directory that can."
    )


def _copy(reader: int, file: BinaryIO | None, terminal: TextIO, prefix: bytes) -> None:
    # To the end, whatever fails: a rank whose pipe nobody reads fails at its next print.
    rest = b""
    with file or contextlib.nullcontext(), os.fdopen(reader, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK):
            try:
                if file is not None:
                    file.write(chunk)
            except OSError as error:
                print_line(f"{file and file.name} ends here: {error}")
                file = None
            # A progress bar ends its lines by a return.
            lines = (rest + chunk).splitlines(keepends=True)
            rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
            if len(rest) > _CHUNK:  # no line
                lines, rest = [*lines, rest + b"\n"], b""
            _show(terminal, [prefix + line for line in lines])
    if rest:
        _show(terminal, [prefix + rest + b"\n"])


def _show(terminal: TextIO, lines: list[bytes]) -> None:
    # One write for all: lines of several ranks stay lines.
    text = b"".join(lines).decode(errors="replace")
    with contextlib.suppress(Exception):  # the terminal has gone
        encoding = terminal.encoding or "utf-8"
        terminal.write(text.encode(encoding, "backslashreplace").decode(encoding))
        terminal.flush()
