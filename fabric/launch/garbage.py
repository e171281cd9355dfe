"""Control of the garbage collector, in this process and in forked ones.

A forked process must not clean up inherited objects: the destructor of a process group that is garbage there
would wait for threads that only the parent has, for ever (measured).
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_collects = True


@contextmanager
def nothing_collected() -> Iterator[bool]:
    """Within, cycles are not looked for, which takes a tenth of a second where many objects are made and
    kept for a short time; gives whether they were before.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield before
    finally:
        if before:
            gc.enable()


@contextmanager
def forking() -> Iterator[None]:
    """Within, processes may be forked: nothing is collected in them before they have called `forked`."""
    global _collects
    with nothing_collected() as _collects:  # the child begins so, too
        yield


def forked() -> None:
    """In the new process: from here on it collects what becomes garbage here."""
    gc.freeze()
    if _collects:
        gc.enable()
