"""Control of the garbage collector, in this process and in forked ones.

A forked process must not collect inherited objects. The destructor of an inherited process group would wait
for ever for threads that only the parent has (measured).
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_was_enabled = True
was_forked = False
"""Whether this process has objects of the process that forked it."""


@contextmanager
def gc_disabled() -> Iterator[bool]:
    """Context without cyclic garbage collection; yields whether it was enabled before.

    Collections take a tenth of a second where many short-lived objects are created.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield was_enabled
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def forking() -> Iterator[None]:
    """Context for forks: the collector is disabled in the child until it calls `after_fork`."""
    global _was_enabled
    with gc_disabled() as _was_enabled:  # inherited by the child
        yield


def after_fork() -> None:
    """Enable the collector in the new process, for objects created in it only."""
    global was_forked
    was_forked = True
    gc.freeze()
    if _was_enabled:
        gc.enable()
