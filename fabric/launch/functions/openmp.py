"""Makes fork safe for OpenMP: the idle threads of this process's pool end before the fork.

A forked child has only the forking thread; without this, its first parallel region waits for ever for the
pool's others.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_RUNTIME = re.compile(r"/.*/lib(?:gomp|omp|iomp)[^/\n]*$", re.MULTILINE)
_SOFT_PAUSE = 1  # omp_pause_soft: keeps settings; the pool comes back at the next parallel region


def rest_openmp() -> bool:
    """End the idle OpenMP threads of the calling thread; whether a child forked now may use several threads.

    Source: OpenMP 5.0, 3.2.44 omp_pause_resource_all; GNU and LLVM runtimes have it.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return False
    rested = [_pause(path) for path in set(_RUNTIME.findall(maps))]
    return bool(rested) and all(rested)


def _pause(path: str) -> bool:
    try:
        return bool(ctypes.CDLL(path).omp_pause_resource_all(_SOFT_PAUSE) == 0)
    except (OSError, AttributeError):
        return False
