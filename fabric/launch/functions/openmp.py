"""`pause_openmp`: makes fork safe for OpenMP by ending the idle threads of this process's pool before it.

A forked child has only the forking thread. Otherwise its first parallel region would wait for ever for the
other threads of the pool.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_RUNTIME = re.compile(r"/.*/lib(?:gomp|omp|iomp)[^/\n]*$", re.MULTILINE)
_SOFT_PAUSE = 1  # omp_pause_soft: keeps settings; the next parallel region restarts the pool


def pause_openmp() -> bool:
    """End the calling thread's idle OpenMP threads; return whether forked children may use several threads.

    Source: OpenMP 5.0, 3.2.44 omp_pause_resource_all; GNU and LLVM runtimes have it.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return False
    paused = [_pause(path) for path in set(_RUNTIME.findall(maps))]
    return bool(paused) and all(paused)


def _pause(path: str) -> bool:
    try:
        return bool(ctypes.CDLL(path).omp_pause_resource_all(_SOFT_PAUSE) == 0)
    except (OSError, AttributeError):
        return False
