"""`RankLogs`: copies the ranks' output line by line; with `--log-dir` prefixed by rank, and to files.
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
"""Seconds to copy remaining output after a rank's exit; a subprocess may keep the pipe open for longer."""


class RankLogs:
    """Copies each rank's output to stdout and stderr, line by line, and to `rank0.out`, `rank0.err`, ...

    A restarted job appends to existing files.

    Args:
        directory: For the files, created if it is missing; None: no files, and no rank prefix.

    Raises:
        ConfigurationError: The directory cannot be created or written to.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self._threads: list[threading.Thread] = []
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _directory_error(directory, error) from error

    def streams(self, rank: int) -> tuple[int, int]:
        """Return descriptors for a rank's stdout and stderr; the caller closes them once the rank runs."""
        return self._start_copy(rank, "out", sys.stdout), self._start_copy(rank, "err", sys.stderr)

    def write_error(self, rank: int, text: str) -> None:
        """Append a text that the rank sent to the supervisor to the rank's file for stderr."""
        with contextlib.suppress(OSError), self._file(rank, "err") or contextlib.nullcontext() as file:
            if file is not None:
                file.write(text.encode())

    def start(self) -> None:
        """Start to copy. Call it after all ranks have been started."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait until the ranks' output has been copied."""
        deadline = time.monotonic() + _DRAIN_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _file(self, rank: int, kind: str) -> BinaryIO | None:
        directory = self.directory
        return None if directory is None else (directory / f"rank{rank}.{kind}").open("ab", buffering=0)

    def _start_copy(self, rank: int, kind: str, terminal: TextIO) -> int:
        try:
            file = self._file(rank, kind)
        except OSError as error:
            raise _directory_error(self.directory, error) from error
        prefix = b"" if file is None else f"[rank {rank}] ".encode()
        reader, writer = os.pipe()
        arguments = (reader, file, terminal, prefix)
        self._threads.append(
            threading.Thread(target=_copy_lines, args=arguments, daemon=True, name="fabric-log")
        )
        return writer


def _directory_error(directory: Path | None, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"--log-dir {directory} cannot be written to: {error}. Pass a directory that allows new files."
    )


def _copy_lines(reader: int, file: BinaryIO | None, terminal: TextIO, prefix: bytes) -> None:
    # Read to the end even if writing fails: a rank fails at its next print if its pipe has no reader.
    partial_line = b""
    with file or contextlib.nullcontext(), os.fdopen(reader, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK):
            try:
                if file is not None:
                    file.write(chunk)
            except OSError as error:
                print_line(f"{file and file.name} is no longer written: {error}")
                file = None
            # A progress bar ends its lines by a carriage return.
            lines = (partial_line + chunk).splitlines(keepends=True)
            partial_line = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
            if len(partial_line) > _CHUNK:  # output without line ends
                lines, partial_line = [*lines, partial_line + b"\n"], b""
            _print(terminal, [prefix + line for line in lines])
    if partial_line:
        _print(terminal, [prefix + partial_line + b"\n"])


def _print(terminal: TextIO, lines: list[bytes]) -> None:
    # One write, so that lines of several ranks do not mix.
    text = b"".join(lines).decode(errors="replace")
    with contextlib.suppress(Exception):  # the terminal is closed
        encoding = terminal.encoding or "utf-8"
        terminal.write(text.encode(encoding, "backslashreplace").decode(encoding))
        terminal.flush()
