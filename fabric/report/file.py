"""`RankFile`: the file of one rank, open for appending; and the check of the directory of a report."""

from __future__ import annotations

import fcntl
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.source import library_frames
from fabric.report.format import FILE_NAME, STEP, pack_header, read_from
from fabric.utilities.cloud_io import local_path

VARIABLE = "FABRIC_REPORT"


def check_directory(given: Any, script: str) -> Path:
    """Return the absolute path of the directory for `Fabric(report=given)`, which is created.

    Args:
        given: The argument `report`; None: FABRIC_REPORT.
        script: The name of this run's script.

    Raises:
        ArgumentTypeError: It is no path.
        ConfigurationError: It is a URL or a file, cannot be written, or has the report of another script.
    """
    value = os.environ[VARIABLE] if given is None else given
    text = f"{VARIABLE}={value}" if given is None else f"report={value!r}"
    kind: type[Exception] = ConfigurationError
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        why, kind = "is no path", ArgumentTypeError
    elif (path := local_path(os.fspath(value))) is None:
        why = "is a URL"
    elif path.exists() and not path.is_dir():
        why = "is a file"
    else:
        try:
            path.mkdir(parents=True, exist_ok=True)
            why = "" if os.access(path, os.W_OK | os.X_OK) else "cannot be written (Permission denied)"
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
        if not why:
            if (first := path / FILE_NAME.format(0)).exists():
                check_script(first, read_from(first, 0)[0], script)
            return path
    raise kind(
        f"{text} {why}. Each rank appends to a file in this directory. Write a local directory that this "
        'user may write, such as report="runs/report".'
    )


def check_script(path: Path, records: list[Any], script: str) -> None:
    """Raise ConfigurationError if the records of a file are from a run of another script."""
    known = records[0].get("script", script) if records and isinstance(records[0], dict) else script
    if known != script:
        raise ConfigurationError(
            f"{path.parent} has the report of {known}, but this run is of {script}. Only a resumed run "
            f'appends to a report. Write report="{path.parent}-{Path(script).stem}", or remove {path.parent}.'
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
        self.path, self.last = path, 0
        """The file, and the number of the last step in it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd: int | None = os.open(path, flags, 0o644)
        try:
            records, self._size = read_from(path, 0)  # before the lock, which closing a file ends
            check_script(path, records, script)
            with suppress(OSError):  # a file system without locks
                self._lock(self._fd)
        except BaseException:
            self.close()
            raise
        for steps in [part for part in records if isinstance(part, bytes)][-1:]:
            self.last = STEP.unpack_from(steps, len(steps) - STEP.size)[1]
        os.ftruncate(self._fd, self._size)
        if not self._size:
            self.append(pack_header())

    def _lock(self, fd: int) -> None:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ConfigurationError(
                f"{self.path} is being written by another process. Two jobs cannot write one report. Write "
                f"another directory, or unset {VARIABLE} for the processes that ranks start."
            ) from None

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
            text = f"The report ends here, and the run goes on: {self.path} cannot be written ({error})."
            with suppress(Warning):  # also where warnings are errors
                warnings.warn(
                    f"{text} Free space on its disk before the next run.", stacklevel=library_frames() + 1
                )

    def close(self) -> None:
        """Close the file; later records are dropped."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
