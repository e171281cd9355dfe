"""What a forked process inherits is not its to clean up.

The destructor of a process group that is garbage there would wait for threads that only the parent has, for
ever (measured).
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_collects = True


@contextmanager
def forking() -> Iterator[None]:
    """Within, processes may be forked: nothing is collected in them before they have called `forked`."""
    global _collects
    _collects = gc.isenabled()
    gc.disable()  # the child begins so, too
    try:
        yield
    finally:
        if _collects:
            gc.enable()


def forked() -> None:
    """In the new process: from here on it collects what becomes garbage here."""
    gc.freeze()
    if _collects:
        gc.enable()
