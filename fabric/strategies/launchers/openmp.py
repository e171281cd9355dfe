"""Makes fork safe for OpenMP: the idle threads of this process's pool end before the fork.

A forked child has only the forking thread; without this, its first parallel region waits for ever for the
pool's others.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_SOFT_PAUSE = 1  # omp_pause_soft: keeps settings; the pool comes back at the next parallel region


def rest_openmp() -> bool:
    """End the idle OpenMP threads of the calling thread; whether a child forked now may use several threads.

    Source: OpenMP 5.0, 3.2.44 omp_pause_resource_all; GNU and LLVM runtimes have it.
    """
    rested = [_pause(path) for path in _runtimes()]
    return bool(rested) and all(rested)


def _pause(path: str) -> bool:
    try:
        return bool(ctypes.CDLL(path).omp_pause_resource_all(_SOFT_PAUSE) == 0)
    except (OSError, AttributeError):
        return False


def _runtimes() -> list[str]:
    """Paths of the OpenMP runtimes that are loaded in this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(
        path for path in paths if any(name in Path(path).name for name in ("libgomp", "libomp", "libiomp"))
    )
