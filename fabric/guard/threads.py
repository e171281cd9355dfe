"""Verbs in several threads of a rank: only one at a time, and in the same thread on all ranks.

`CallChecker.compare` calls `with_thread` if another thread made the last call, or called `launch`.
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


def with_thread(call: CallSignature, detector: DeadlockDetector) -> CallSignature:
    """Return `call` with the name of this thread; unchanged in the thread of `launch` and in autograd's.

    Ranks compare the name: the order of calls in two threads can differ between ranks.

    Raises:
        CollectiveMismatch: The last call is still running in its thread. Later calls of all ranks raise, too.
    """
    this = threading.current_thread()
    last, detector.last_thread = detector.last_thread, this.ident
    detector.fast_path_thread = None
    if last != this.ident and (frame := _collective_frame(sys._current_frames().get(last))):
        other = next((one.name for one in threading.enumerate() if one.ident == last), str(last))
        detector.fatal_error = (
            f"Two threads of rank {detector.rank} call fabric at the same time: {this.name!r} {call.verb} at "
            f"{user_line()}, and {other!r} at {user_line(frame)}. The order of their calls differs between "
            "ranks, so that their data would be mixed. Make all calls in one thread, or thread.join() first."
        )
        detector.publish_verdict(detector.fatal_error, True, detector.store.clone())  # for waiting ranks
        raise CollectiveMismatch(detector.fatal_error)
    if this.ident == detector.launch_thread or isinstance(this, threading._DummyThread):
        detector.fast_path_thread = this.ident
        return call
    name = _stable_name(this)
    digest = blake2b(call.digest + name.encode(), digest_size=16).digest()
    return call._replace(verb=f"{call.verb}{IN_THREAD}{name!r}", digest=digest)


def _collective_frame(frame: Any) -> Any:
    """Return the innermost frame of a collective on a thread's stack; None: it is in none."""
    while frame is not None and not frame.f_code.co_filename.startswith(_COLLECTIVES):
        frame = frame.f_back
    return frame


def _stable_name(thread: Any) -> str:
    """Return a name that is equal on all ranks: without numbers, which count all threads of a process."""
    if not hasattr(thread, "_fabric_name"):
        plain = _without_numbers(thread.name)
        names = [one.name for one in threading.enumerate() if _without_numbers(one.name) == plain]
        index = sorted(names, key=lambda name: (len(name), name)).index(thread.name)
        # No number for workers of a pool: which of them runs a task differs between ranks.
        thread._fabric_name = f"{plain} {index}" if index and plain.startswith("Thread") else plain
    return str(thread._fabric_name)


def _without_numbers(name: str) -> str:
    return re.sub(r"[-_]?\d+", "", name)
