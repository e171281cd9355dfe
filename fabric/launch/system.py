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
    """Check that this system can start and watch ranks, which needs signals, pipes and forks.

    Closed standard descriptors (`python train.py >&-`) are opened on /dev/null. Otherwise a socket would get
    their number, and the output.

    Raises:
        LaunchError: The system is Windows.
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
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def allow_open_files(count: int) -> bool:
    """Raise this process's limit on open files to `count`, or to the system's limit if that is lower.

    Returns:
        Whether the limit is at least `count` now.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed == count


@contextmanager
def private_sockets() -> Iterator[None]:
    """Context whose new sockets are not inherited by children, which would keep gloo's ports open."""
    existing = _sockets()
    try:
        yield
    finally:
        for descriptor in _sockets() - existing:
            with suppress(OSError):
                os.set_inheritable(descriptor, False)


def _sockets() -> set[int]:
    """Return the descriptors of this process's sockets."""
    sockets = set()
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):  # noqa: PTH208  numbers
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    sockets.add(int(name))
    return sockets
