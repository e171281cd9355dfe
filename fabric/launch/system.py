"""System requirements of several processes: POSIX, open files. Imports no torch."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from fabric.core.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEM = os.name


def require_posix() -> None:
    """Check that this system can start and watch ranks: signals, pipes, forks, three standard descriptors.

    Those of the last that are closed (`python train.py >&-`) are opened on /dev/null: a socket would take
    their number, and what is printed.

    Raises:
        LaunchError: It has not: Windows.
    """
    if SYSTEM != "posix":
        raise LaunchError(
            "Several processes need Linux or macOS (signals, pipes and forks as POSIX has them), and this is "
            "Windows. Run it in WSL2, or write devices=1 for one process."
        )
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def allow_open_files(count: int) -> bool:
    """Raise this process's limit on open files towards `count` (never above what the system allows it).

    Returns:
        Whether so many may be open now.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed == count


@contextmanager
def private_sockets() -> Iterator[None]:
    """Keep sockets that are opened inside from children of this process, which would hold gloo's ports."""
    before = _sockets()
    try:
        yield
    finally:
        for descriptor in _sockets() - before:
            with suppress(OSError):
                os.set_inheritable(descriptor, False)


def _sockets() -> set[int]:
    """Return the descriptors of this process's sockets."""
    found = set()
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):  # noqa: PTH208  numbers
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    found.add(int(name))
    return found
