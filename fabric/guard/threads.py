"""Verbs of several threads of a rank: one at a time, and each rank in the same one.

`CallChecker.compare` calls this where a call is made in another thread than the call before it, or than
`launch`.
"""

from __future__ import annotations

import re
import sys
import threading
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.collectives import channel
from fabric.collectives.frames import IN_THREAD
from fabric.core.errors import CollectiveMismatch
from fabric.core.source import user_line

if TYPE_CHECKING:
    from fabric.collectives.frames import CallSignature
    from fabric.guard.deadlocks import DeadlockDetector

_COLLECTIVES = str(Path(channel.__file__).parent)


def in_this_thread(call: CallSignature, waits: DeadlockDetector) -> CallSignature:
    """`call` with the thread that makes it, unless that is the thread of the launch, or one of autograd.

    The other ranks compare the thread: calls of two threads can have another order on each rank.

    Raises:
        CollectiveMismatch: The thread of the call before is still in it; so does each later call of a rank.
    """
    me = threading.current_thread()
    last, waits.last_thread = waits.last_thread, me.ident
    waits.thread = None
    if last != me.ident and (there := _verb_frame(sys._current_frames().get(last))):
        other = next((one.name for one in threading.enumerate() if one.ident == last), str(last))
        waits.broken = (
            f"Two threads of rank {waits.rank} call fabric at the same time: {me.name!r} {call.verb} at "
            f"{user_line()}, and {other!r} at {user_line(there)}. The order of their calls differs between "
            "ranks, so that their data would be mixed. Make all calls in one thread, or thread.join() first."
        )
        waits.publish(waits.broken, True, waits.store.clone())  # for the ranks that wait
        raise CollectiveMismatch(waits.broken)
    if me.ident == waits.home or isinstance(me, threading._DummyThread):
        waits.thread = me.ident
        return call
    name = _name_of(me)
    digest = blake2b(call.digest + name.encode(), digest_size=16).digest()
    return call._replace(verb=f"{call.verb}{IN_THREAD}{name!r}", digest=digest)


def _verb_frame(frame: Any) -> Any:
    """The innermost frame of a collective on a thread's stack; None: it is in none."""
    while frame is not None and not frame.f_code.co_filename.startswith(_COLLECTIVES):
        frame = frame.f_back
    return frame


def _name_of(thread: Any) -> str:
    """A name that is the same on all ranks: without numbers, which count the other threads of a process."""
    if not hasattr(thread, "_fabric_name"):
        plain = _plain(thread.name)
        alike = [one.name for one in threading.enumerate() if _plain(one.name) == plain]
        place = sorted(alike, key=lambda name: (len(name), name)).index(thread.name)
        # Which worker of a pool takes a task is chance.
        thread._fabric_name = f"{plain} {place}" if place and plain.startswith("Thread") else plain
    return str(thread._fabric_name)


def _plain(name: str) -> str:
    return re.sub(r"[-_]?\d+", "", name)
