"""`Watchdog`: a thread of each rank that says where all ranks are, once one of them has waited too long.

It polls the call of all ranks that the main thread waits in, and the place where the main thread is blocked.
At each look it publishes them through the store. Every rank does so from its own thread, so also
one that is busy or stuck in Python; one of which nothing new is heard has ended, or cannot run Python. The
main thread does nothing for it.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.core.errors import CollectiveMismatch, ConfigurationError, RankError
from fabric.core.messages import print_line
from fabric.core.parts import Part
from fabric.guard.call_checker import reason_of, waits_of_world
from fabric.guard.deadlocks import LEFT, SILENT, RankStatus, as_table
from fabric.guard.job_store import StoreTimeout
from fabric.guard.messages import RankReport
from fabric.watchdog.stacks import StillWatch, batch_wait, user_line

if TYPE_CHECKING:
    from fabric.guard.deadlocks import DeadlockDetector
    from fabric.watchdog.devices import DeviceWatch

REPORT_AFTER = 60.0
VARIABLE = "FABRIC_HANG_REPORT_AFTER"
_PERIOD = 1.0
"""Seconds between two looks; more in large jobs, for the store's sake."""
_ANSWER = 1.5
"""Seconds, or three looks, in which each rank should have told where it is."""
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


def make_part(strategy: Any) -> HangReport:
    """Return the hang report of a strategy of several ranks."""
    return HangReport(strategy)


class HangReport(Part):
    """The watchdog of the process group, for one strategy.

    Args:
        strategy: Of several ranks.
    """

    name = "hang report"

    def __init__(self, strategy: Any) -> None:
        self._strategy = weakref.proxy(strategy)
        self.watchdog = watch_over(strategy.root_device)
        """None: FABRIC_HANG_REPORT_AFTER=off."""

    def failed(self, error: Exception, doing: str) -> None:
        """Raise the table of where all ranks are, in place of an error of the process group.

        Raises:
            RankError: Another rank ended, or did not make the call.
            CollectiveMismatch: Ranks wait for each other in different calls.
        """
        if self.watchdog is not None:
            self.watchdog.explain(error, doing)

    def teardown(self) -> None:
        """End the watchdog, if the strategy made the process group."""
        if self.watchdog is not None and self._strategy.made_group:
            self.watchdog.stop()
        self.watchdog = None


class Watchdog:
    """Watches the thread that makes it.

    Args:
        waits: Where this rank's calls of all ranks say that they wait.
        after: Seconds of waiting after which the ranks are asked.
        device: Of this rank.
    """

    def __init__(self, waits: DeadlockDetector, after: float, device: torch.device) -> None:
        self._store = waits.store.clone()
        self._waits = waits
        self._after = self._next = after
        self._period = max(min(_PERIOD, after / 4), waits.world_size / 2048)
        self._thread = threading.get_ident()
        self._still = StillWatch(self._thread)
        self._device: DeviceWatch | None = None
        if device.type not in ("cpu", "mps"):
            from fabric.watchdog.devices import DeviceWatch

            self._device = DeviceWatch(device, after / 2)
        self._slow: dict[str, float] = {}  # by loader: shorter waits for a batch are not reported again
        self._tables = 0  # that ranks have printed
        self._heard: float | None = None  # when a verdict came that the thread will never go on
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
            from fabric.launch.rank_exit import describe

            end = f"raised {describe(error)}"
        with suppress(Exception):  # the store may have gone before
            self._waits.tell(self._waits.stand(RankReport(self._waits.rank, LEFT, "", end), None))

    def whereabouts(self) -> dict[int, RankStatus]:
        """Return new statuses of all ranks, from their own watchdogs. May be called by any thread."""
        waits, end = self._waits, time.monotonic() + max(_ANSWER, 3 * self._period)
        ranks = {*range(waits.world_size)} - {waits.rank}
        # A connection that has a call of another thread on its way would seem to be silent.
        store = self._store if threading.current_thread() is self._watcher else waits.store
        before = found = waits.read(store)
        while ranks and time.monotonic() < end:
            time.sleep(max(self._period / 2, waits.world_size / 1024))
            found = waits.read(store)
            ranks = {r for r in ranks if found.get(r) == before.get(r) and not _has_left(found.get(r))}
        found[waits.rank] = self._stands()._replace(told=time.monotonic())
        for rank in ranks:
            text = "it has died, cannot be reached, or something keeps Python from running there"
            found[rank] = RankStatus(rank, "", SILENT, "", text, None, {})
        return dict(sorted(found.items()))

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
            more = f"Where the ranks are:\n{as_table(self.whereabouts().values())}"
        except StoreTimeout as silent:
            more = f"This rank {silent}."
        except Exception:  # the store went with the rank that kept it
            return
        raise RankError(
            f"{doing} failed on rank {self._waits.rank}, since another rank ended or did not come "
            f"({reason_of(error)}). {more}"
        ) from error

    def _watch(self) -> None:
        while not self._over.wait(self._period):
            try:
                self._look()
            except Exception as error:
                if not isinstance(error, dist.DistError | OSError):  # else the store has gone, with the job
                    print_line(f"the watchdog of rank {self._waits.rank} ends, it failed: {error!r}")
                atexit.unregister(self.stop)
                return

    def _look(self) -> None:
        wait, said, silent = self._stands(), self._tables, None
        try:
            self._waits.tell(wait, self._store)
            if wait.pending:
                self._waits.judge(self._store)
            said = self._store.add("tables", 0)
        except StoreTimeout as error:
            silent = error
        self._end_if_hopeless(wait)
        if wait.since is None:
            self._next = self._after
        else:
            seconds = time.monotonic() - wait.since
            if said > self._tables:  # another rank has said it
                self._next = max(self._next, seconds * _AGAIN)
            elif seconds >= max(self._next, self._slow.get(wait.verb, 0.0)):
                self._next = seconds * _AGAIN
                if wait.verb.startswith("the loader"):
                    self._slow[wait.verb] = self._next
                self._report(wait, seconds, silent)
        self._tables = max(said, self._tables)

    def _stands(self) -> RankStatus:
        """Return the status of the thread. Called at each look: quick."""
        still = self._still.look()
        stuck = None if self._device is None else self._device.look(self._still.stays)
        if self._waits.here is not None:
            return self._waits.here
        what, since = still or stuck or batch_wait(self._thread) or ("", None)
        wait = self._waits.stand(RankReport(self._waits.rank, what, "", user_line(self._thread)), since)
        if still is None or time.monotonic() - still[1] < _STILL_S:
            return wait
        begun, pending = self._waits.begun(self._thread)
        return wait._replace(begun=begun, pending=pending) if pending else wait

    def _end_if_hopeless(self, wait: RankStatus) -> None:
        """End this process if by a verdict its thread stands still for ever, and nobody's end does it."""
        verdict, now = self._waits.broken, time.monotonic()
        if verdict is None or not wait.pending:
            self._heard = None
            return
        self._heard = self._heard or now
        if now - self._heard < _END_S and self._waits.can_raise:
            return
        error = CollectiveMismatch(verdict)
        try:
            sys.excepthook(type(error), error, None)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # whatever hooks and streams do: the others wait for the end
            os._exit(1)

    def _report(self, wait: RankStatus, seconds: float, silent: StoreTimeout | None) -> None:
        me = str(wait.rank)
        waited = f"rank {me} has waited {seconds:.0f} s in {wait.verb}"
        if silent is not None:
            where = f"at {wait.where} ({VARIABLE}={self._after:g})"
            print_line(f"{waited} {where}, and cannot ask the others: {silent}.")
        elif self._store.compare_set(f"table/{self._tables}", "", me) == me.encode():  # else another does
            self._tables = self._store.add("tables", 1)
            text = as_table(self.whereabouts().values())
            print_line(f"{waited} ({VARIABLE}={self._after:g}). Where the ranks are:\n{text}")


def _has_left(wait: RankStatus | None) -> bool:
    return wait is not None and wait.verb == LEFT
