"""`RankFile`: the file of one rank, open for appending; and the check of the directory of a report."""

from __future__ import annotations

import fcntl
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.report.format import FILE_NAME, STEP, pack_header, read_from
from fabric.utilities.cloud_io import local_path

VARIABLE = "FABRIC_REPORT"


def check_directory(given: Any, script: str) -> Path:
    """Return the absolute path of the directory for `Fabric(report=given)`, which is created.

    Args:
        given: The argument; None: FABRIC_REPORT.
        script: The name of this run's script.

    Raises:
        ArgumentTypeError: It is no path.
        ConfigurationError: It is a URL or a file, cannot be written, or has the report of another script.
    """
    text = f"{VARIABLE}={os.environ.get(VARIABLE)}" if given is None else f"report={str(given)!r}"
    given = os.environ[VARIABLE] if given is None else given
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ArgumentTypeError(
            f"report={given!r} is no directory. Each rank writes a file into the directory of the report. "
            'Write report="runs/report".'
        )
    path = local_path(os.fspath(given))
    if path is None:
        raise ConfigurationError(
            f"{text} is a URL. Ranks append to their files after each step, which only file systems can. "
            'Write a local directory, such as report="runs/report".'
        )
    if path.exists() and not path.is_dir():
        raise ConfigurationError(
            f"{text} is a file. Ranks write {FILE_NAME.format(0)} and its like into a directory. Write the "
            f'name of a directory, such as report="{given}-report".'
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError("permission denied")
    except OSError as error:
        raise ConfigurationError(
            f"{text} cannot be written ({error.strerror or error}). Each rank writes a file into it. Write "
            "a directory that this user may write."
        ) from error
    first = path / FILE_NAME.format(0)
    if first.exists():
        check_script(first, read_from(first, 0)[0], script)
    return path


def check_script(path: Path, records: list[Any], script: str) -> None:
    """Raise if the records of a file are of a run of another script.

    Raises:
        ConfigurationError: They are.
    """
    known = records[0].get("script", script) if records and isinstance(records[0], dict) else script
    if known != script:
        raise ConfigurationError(
            f"{path.parent} has the report of {known}, but this run is of {script}. A run that was "
            "interrupted appends to its own report; another run needs another directory. Write "
            f'report="{path.parent}-{Path(script).stem}", or remove {path.parent}.'
        )


class RankFile:
    """A rank's file, open for appending. A record that an earlier process did not finish is removed.

    Args:
        path: The file.
        script: The name of this run's script.

    Raises:
        ConfigurationError: It has the report of another script, or another process writes it.
        UsageError: It is no file of a report, or is damaged.
        OSError: It cannot be written.
    """

    def __init__(self, path: Path, script: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.last = 0
        """The number of the last step in it."""
        try:
            records, self._size = read_from(path, 0)
            self._lock()
            check_script(path, records, script)
        except BaseException:
            self.close()
            raise
        for steps in [part for part in records if isinstance(part, bytes)][-1:]:
            self.last = STEP.unpack_from(steps, len(steps) - STEP.size)[1]
        os.ftruncate(self._fd, self._size)
        if not self._size:
            self.append(pack_header())

    def _lock(self) -> None:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
        except (BlockingIOError, PermissionError):
            raise ConfigurationError(
                f"{self.path} is being written by another process. Two jobs, or a job that this rank "
                f"started, cannot write one report. Write another directory, or unset {VARIABLE} for the "
                "processes that ranks start."
            ) from None
        except OSError:  # a file system without locks
            pass

    def append(self, record: bytes) -> None:
        """Write a record by one call of the system, so that it survives the process.

        After an error of the system, such as a full disk, there is a warning, and the file is closed.
        """
        if self._fd is None:
            return
        try:
            if os.write(self._fd, record) != len(record):
                raise OSError("no space left")
            self._size += len(record)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self.close()
            warnings.warn(
                f"The report ends here, and the run goes on: {self.path} cannot be written "
                f"({error.strerror or error}). Free space on its disk before the next run.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the file; later records are dropped."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
