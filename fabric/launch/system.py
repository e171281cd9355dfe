"""System requirements of several processes: POSIX, open files. Imports no torch."""

from __future__ import annotations

import os

from fabric.core.errors import LaunchError

SYSTEM = os.name


def require_posix() -> None:
    """Whether this system has the signals, pipes and forks that ranks are started and watched with.

    Raises:
        LaunchError: It has not: Windows.
    """
    if SYSTEM != "posix":
        raise LaunchError(
            "Several processes need Linux or macOS (signals, pipes and forks as POSIX has them), and this is "
            "Windows. Run it in WSL2, or write devices=1 for one process."
        )


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
