"""`Watchdog`: a thread of each rank that says where all ranks are, once one of them has waited too long.

It looks at what the main thread left behind (a call of all ranks that it waits in) and where it stands still,
and asks the others through the store. Every rank answers from its own thread, so also one that is busy or
stuck in Python; one that does not answer has ended, or cannot run Python. Nothing is written while nothing
waits, and the main thread does nothing for it.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fabric.core.errors import CollectiveMismatch, ConfigurationError, RankError
from fabric.core.messages import say
from fabric.plugins.collectives.control import reason_of, waits_of_world
from fabric.plugins.collectives.frames import Said
from fabric.plugins.collectives.job_store import StoreSilent
from fabric.plugins.collectives.waits import Here, Whereabouts
from fabric.watch.stacks import StillWatch, user_line

if TYPE_CHECKING:
    from fabric.plugins.collectives.waits import Waits
    from fabric.watch.devices import DeviceWatch

REPORT_AFTER = 60.0
VARIABLE = "FABRIC_HANG_REPORT_AFTER"
_PERIOD = 1.0
"""Seconds between two looks; more in large jobs, for the store's sake."""
_ANSWER = 1.5
"""Seconds that ranks have to answer; they look twice, and more, in that time."""
_AGAIN = 5.0
"""The next table of one hang comes after so many times the seconds of the last."""


_OF_THE_GROUP = re.compile(
    r"(?<!launch )timed out|timeout|closed by peer|connection (reset|refused|closed)|broken pipe|pair closure"
    r"|ncclRemoteError|NCCL communicator was aborted",
    re.IGNORECASE,
)
"""How torch's backends say that another rank ended or did not come; a launch that timed out is a kernel's."""


_STILL_S = 2.0
"""Seconds for which a thread must have stood still before others are told."""


_END_S = 30.0
"""Seconds in which ranks that raise should have ended, and with them what a thread waits for."""


_LEFT, _SILENT = "has left", "no answer"


class _Stands(NamedTuple):
    """Since when the thread stands still in torch's collectives, as far as the watchdog's own looks tell."""

    since: float | None = None
    stamp: int = 0
    """Of the post that says so; 0: not posted."""
    heard: float = 0.0
    """When a verdict was heard that it will never end."""


class Seen(NamedTuple):
    """Where a rank is, as it tells the others."""

    rank: int
    host: str
    what: str
    """The call it waits in; "" outside of any."""
    seconds: float | None
    where: str


def report_after() -> float | None:
    """Seconds after which a wait is reported, of FABRIC_HANG_REPORT_AFTER; None: never.

    Raises:
        ConfigurationError: It is no number.
    """
    text = os.environ.get(VARIABLE, str(REPORT_AFTER))
    try:
        seconds = 0.0 if text.lower() == "off" else float(text)
        if not seconds >= 0:
            raise ValueError
    except ValueError:
        raise ConfigurationError(
            f"{VARIABLE}={text!r} is no number of seconds. Write for example {VARIABLE}=60, or =off."
        ) from None
    return seconds or None


_watchdogs: weakref.WeakKeyDictionary[Any, Watchdog | None] = weakref.WeakKeyDictionary()


def watch_over(device: torch.device) -> Watchdog | None:
    """The watchdog of torch's default process group, which looks at this rank's device, too; None: switched
    off.

    Raises:
        ConfigurationError: FABRIC_HANG_REPORT_AFTER is no number.
    """
    world = dist.group.WORLD
    if world not in _watchdogs:
        after = report_after()
        _watchdogs[world] = None if after is None else Watchdog(waits_of_world(), after, device)
    return _watchdogs[world]


class Watchdog:
    """Watches the thread that makes it.

    Args:
        waits: Where this rank's calls of all ranks say that they wait.
        after: Seconds of waiting after which the ranks are asked.
        device: Of this rank.
    """

    def __init__(self, waits: Waits, after: float, device: torch.device) -> None:
        self._store = waits.store.clone("fabric/watch")
        self._board = self._store.part(waits.store.prefix)
        self._lock = threading.Lock()  # the main thread asks, too, when a call has failed
        self._waits = waits
        self._rank, self._world = waits.rank, waits.world_size
        self._after = self._next = after
        self._period = max(min(_PERIOD, after / 4), self._world / 2048)
        self._thread = threading.get_ident()
        self._still = StillWatch(self._thread)
        self._device: DeviceWatch | None = None
        if device.type not in ("cpu", "mps"):
            from fabric.watch.devices import DeviceWatch

            self._device = DeviceWatch(device, after / 2)
        self._answered, self._heard = 0, 0.0
        self._stands = _Stands()
        self._over = threading.Event()
        waits.explain = self.whereabouts
        atexit.register(self.stop)
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="fabric-watchdog")
        self._watcher.start()

    def stop(self) -> None:
        """End the thread, and tell the others that this rank has left."""
        atexit.unregister(self.stop)
        if self._over.is_set():
            return
        self._over.set()
        self._watcher.join(2.0)
        self._waits.explain = None
        error = getattr(sys, "last_value", None)
        end = "finished"
        if error is not None:
            from fabric.processes.endings import describe

            end = f"raised {describe(error)}"
        with suppress(Exception):  # the store may have gone before
            self._waits.leave(json.dumps([socket.gethostname(), end]))

    def whereabouts(self) -> Whereabouts:
        """Ask all ranks where they are. May be called by any thread of any rank."""
        try:
            rows = self._asked()
        except Exception:
            return Whereabouts([], "")  # the store went with the rank that kept it
        return Whereabouts([row.rank for row in rows if row.what in (_LEFT, _SILENT)], as_table(rows))

    def explain(self, error: Exception, doing: str) -> None:
        """Raise what lies behind an error of the process group, if it is one.

        Raises:
            CollectiveMismatch: Ranks wait for each other in different calls.
            RankError: With the table of where the ranks are.
        """
        if isinstance(error, torch.AcceleratorError) or _OF_THE_GROUP.search(str(error)) is None:
            return  # what a device says of itself may also be of a time that has passed
        self._store.settle()
        with suppress(Exception):  # the store went with the rank that kept it
            self._waits.hear()
        if self._waits.broken is not None:
            raise CollectiveMismatch(self._waits.broken) from error
        try:
            more = f"Where the ranks are:\n{as_table(self._asked())}"
        except StoreSilent as silent:
            more = f"This rank {silent}."
        except Exception:  # the store went with the rank that kept it
            return
        raise RankError(
            f"{doing} failed on rank {self._rank}, since another rank ended or did not come "
            f"({reason_of(error)}). {more}"
        ) from error

    def _watch(self) -> None:
        while not self._over.wait(self._period):
            try:
                self._look()
            except Exception as error:
                if not isinstance(error, dist.DistError | OSError):  # else the store has gone, with the job
                    say(f"the watchdog of rank {self._rank} ends, it failed: {error!r}")
                atexit.unregister(self.stop)
                return

    def _look(self) -> None:
        silent, still = None, self._still.look()
        try:
            reported = self._answer()
            self._share(still)
        except StoreSilent as error:
            reported, silent = False, error
        wait = self._wait(still)
        seconds = None if wait is None else time.monotonic() - wait.since
        if seconds is None:
            self._next = self._after
        elif reported:  # another rank has said it
            self._next = max(self._next, seconds * _AGAIN)
        elif seconds >= self._next:
            self._next = seconds * _AGAIN
            self._report(self._here(), silent)

    def _share(self, still: Here | None) -> None:
        """Let ranks that wait in a call know if this one stands still in torch's collectives."""
        still = still if self._waits.here is None else None
        stands, since = self._stands, None if still is None else still.since
        if since != stands.since or still is None:
            if stands.stamp:
                self._waits.withdraw(stands.stamp, self._board)
            self._stands = _Stands(since)
            return
        if stands.stamp:
            self._waits.judge(self._board)
            self._end()
        elif time.monotonic() - still.since >= _STILL_S:
            begun = self._waits.begun(self._thread)
            if begun.pending:
                row = Said(self._rank, still.verb, "", user_line(self._thread))
                self._stands = stands._replace(stamp=self._waits.post_still(self._board, row, begun))

    def _end(self) -> None:
        """End this process if by a verdict its thread stands still for ever, and nobody's end does it."""
        verdict, now = self._waits.broken, time.monotonic()
        if verdict is None:
            return
        self._stands = stands = self._stands._replace(heard=self._stands.heard or now)
        if now - stands.heard < _END_S and self._waits.can_raise:
            return
        error = CollectiveMismatch(verdict)
        try:
            sys.excepthook(type(error), error, None)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # whatever hooks and streams do: the others wait for the end
            os._exit(1)

    def _report(self, seen: Seen, silent: StoreSilent | None) -> None:
        waited = f"rank {self._rank} has waited {seen.seconds or 0:.0f} s in {seen.what}"
        if silent is not None:
            say(
                f"{waited} at {seen.where} ({VARIABLE}={self._after:g}), and cannot ask the others: {silent}."
            )
            return
        round_, me = self._store.add("asked", 0), str(self._rank)
        if round_ > self._answered or self._store.compare_set(f"by/{round_}", "", me) != me.encode():
            return  # another rank has just asked
        text = as_table(self._asked())
        say(f"{waited} ({VARIABLE}={self._after:g}). Where the ranks are:\n{text}")

    def _asked(self) -> list[Seen]:
        fresh = time.monotonic() - self._heard < _ANSWER and self._answered > 0
        # When one rank ends all others ask at once: they share the first one's question.
        round_ = self._answered if fresh else self._store.add("asked", 1)
        self._answer()
        ranks, pause = range(self._world), max(0.02, self._world / 2048)
        deadline = time.monotonic() + max(_ANSWER, 3 * self._period)
        while time.monotonic() < deadline and self._store.add(f"count/{round_}", 0) < self._world:
            time.sleep(pause)
        told = self._store.get_all([f"at/{round_}/{rank}" for rank in ranks])
        rows = []
        for rank in ranks:
            key, left = f"at/{round_}/{rank}", f"left/{rank}"
            if key in told:
                rows.append(Seen(*json.loads(told[key])))
            elif self._board.check([left]):
                host, end = json.loads(self._board.get(left))
                rows.append(Seen(rank, host, _LEFT, None, end))
            else:
                text = "it has died, cannot be reached, or something keeps Python from running there"
                rows.append(Seen(rank, "", _SILENT, None, text))
        return rows

    def _answer(self) -> bool:
        with self._lock:
            asked, before = int(self._store.add("asked", 0)), self._answered
            if asked > before:
                self._heard = time.monotonic()
            for round_ in range(before + 1, asked + 1):
                self._store.set(f"at/{round_}/{self._rank}", json.dumps(self._here()))
                self._store.add(f"count/{round_}", 1)
            self._answered = asked
        return asked > before

    def _wait(self, still: Here | None) -> Here | None:
        """What this rank waits in; None: nothing that is known. Called at each look: quick."""
        stuck = None if self._device is None else self._device.look(self._still.stays)
        return self._waits.here or still or stuck

    def _here(self) -> Seen:
        wait, host = self._wait(self._still.look()), socket.gethostname()
        where = "" if wait is None else wait.where
        where = where or user_line(self._thread)
        if wait is None:
            return Seen(self._rank, host, "", None, where)
        return Seen(self._rank, host, wait.verb, time.monotonic() - wait.since, where)


def as_table(rows: list[Seen]) -> str:
    """A line per rank."""
    from fabric.plugins.collectives.mismatch import aligned

    cells = [("rank", "host", "in", "for", "at")]
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.0f} s"
        what = row.what or "no call of all ranks"
        cells.append((str(row.rank), row.host, what, seconds, row.where))
    return aligned(cells)
