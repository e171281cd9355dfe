"""`Watchdog`: a thread of each rank that prints where all ranks are, once one of them has waited too long.

It polls the collective in which the main thread waits, and the place where the main thread is blocked. Each
poll publishes them through the store. It does so even if the main thread is busy or stuck in Python. A rank
without new statuses has ended, or cannot run Python. The main thread does nothing for it.
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
from fabric.guard.call_checker import job_detector, reason_of
from fabric.guard.deadlocks import EXITED, SILENT, RankStatus, status_table
from fabric.guard.job_store import StoreTimeout
from fabric.guard.messages import RankReport
from fabric.watchdog.stacks import BlockedThread, batch_wait, line_of_thread

if TYPE_CHECKING:
    from fabric.guard.deadlocks import DeadlockDetector
    from fabric.watchdog.devices import StalledDevice

REPORT_AFTER = 60.0
VARIABLE = "FABRIC_HANG_REPORT_AFTER"
_PERIOD_S = 1.0
"""Seconds between two polls; more in large jobs, since the store serves all ranks."""
_ANSWER_S = 1.5
"""Seconds (at least three polls) within which each rank should have published a new status."""
_REPEAT_FACTOR = 5.0
"""The wait at the next table of one hang, as a multiple of the wait at the last one."""


_PEER_ERROR = re.compile(
    r"(?<!launch )timed out|timeout|closed by peer|connection (reset|refused|closed)|broken pipe|pair closure"
    r"|ncclRemoteError|NCCL communicator was aborted",
    re.IGNORECASE,
)
"""Messages of torch's backends if another rank ended or is missing. "launch timed out" is about a kernel."""


_BLOCKED_S = 2.0
"""Seconds for which a thread must be blocked before the collectives that it waits for are published."""


_END_S = 30.0
"""Seconds within which ranks that raise should exit, and so end the wait of this rank."""


def report_after() -> float | None:
    """Return FABRIC_HANG_REPORT_AFTER, the seconds after which a wait is reported; None: never.

    Raises:
        ConfigurationError: It is not a number.
    """
    text = os.environ.get(VARIABLE, str(REPORT_AFTER))
    try:
        seconds = 0.0 if text.lower() == "off" else float(text)
        if not seconds >= 0:
            raise ValueError
    except ValueError:
        raise ConfigurationError(
            f"{VARIABLE}={text!r} is not a number of seconds. Write for example {VARIABLE}=60, or =off."
        ) from None
    return seconds or None


_watchdogs: weakref.WeakKeyDictionary[Any, Watchdog | None] = weakref.WeakKeyDictionary()


def watchdog_of_job(device: torch.device) -> Watchdog | None:
    """Return the watchdog of torch's default process group; None: switched off.

    Args:
        device: The device of this rank, which is watched, too.

    Raises:
        ConfigurationError: FABRIC_HANG_REPORT_AFTER is not a number.
    """
    world = dist.group.WORLD
    if world not in _watchdogs:
        after = report_after()
        _watchdogs[world] = None if after is None else Watchdog(job_detector(), after, device)
    return _watchdogs[world]


def make_part(strategy: Any) -> HangReport:
    """Return the hang report of a strategy of several ranks."""
    return HangReport(strategy)


class HangReport(Part):
    """The watchdog of the process group, for one strategy.

    Args:
        strategy: A strategy of several ranks.
    """

    name = "hang report"

    def __init__(self, strategy: Any) -> None:
        self._strategy = weakref.proxy(strategy)
        self.watchdog = watchdog_of_job(strategy.root_device)
        """None: FABRIC_HANG_REPORT_AFTER=off."""

    def failed(self, error: Exception, doing: str) -> None:
        """Raise the table of where all ranks are, in place of an error of the process group.

        Raises:
            RankError: Another rank ended, or did not make the call.
            CollectiveMismatch: Ranks wait for each other in different calls.
        """
        if self.watchdog is not None:
            self.watchdog.translate_error(error, doing)

    def teardown(self) -> None:
        """End the watchdog, if the strategy made the process group."""
        if self.watchdog is not None and self._strategy.made_group:
            self.watchdog.stop()
        self.watchdog = None


class Watchdog:
    """Watches the thread that creates it.

    Args:
        detector: The deadlock detector of this rank.
        after: Seconds of waiting after which the statuses of all ranks are printed.
        device: The device of this rank.
    """

    def __init__(self, detector: DeadlockDetector, after: float, device: torch.device) -> None:
        self._store = detector.store.clone()
        self._detector = detector
        self._after = self._next = after
        self._period = max(min(_PERIOD_S, after / 4), detector.world_size / 2048)
        self._thread = threading.get_ident()
        self._blocked = BlockedThread(self._thread)
        self._device: StalledDevice | None = None
        if device.type not in ("cpu", "mps"):
            from fabric.watchdog.devices import StalledDevice

            self._device = StalledDevice(device, after / 2)
        self._reported: dict[str, float] = {}  # by loader: shorter waits for a batch are not reported again
        self._tables = 0  # printed by all ranks
        self._deadlocked_since: float | None = None  # time of a verdict in which the thread waits forever
        self._stopped = threading.Event()
        detector.collect_statuses = self.collect_statuses
        atexit.register(self.stop)
        self._poller = threading.Thread(target=self._run, daemon=True, name="fabric-watchdog")
        self._poller.start()

    def stop(self) -> None:
        """End the thread, and publish that this rank exits."""
        atexit.unregister(self.stop)
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._poller.join(2.0)
        self._detector.collect_statuses = None
        error = getattr(sys, "last_value", None)
        end = "finished"
        if error is not None:
            from fabric.launch.rank_exit import describe

            end = f"raised {describe(error)}"
        with suppress(Exception):  # the host of the store may have exited
            report = RankReport(self._detector.rank, EXITED, "", end)
            self._detector.publish_status(self._detector.status(report, None))

    def collect_statuses(self) -> dict[int, RankStatus]:
        """Return new statuses of all ranks, from their own watchdogs. May be called by any thread."""
        detector, end = self._detector, time.monotonic() + max(_ANSWER_S, 3 * self._period)
        ranks = {*range(detector.world_size)} - {detector.rank}
        # A store blocks while another thread uses its connection, as if its host did not answer.
        store = self._store if threading.current_thread() is self._poller else detector.store
        before = found = detector.read_statuses(store=store)
        while ranks and time.monotonic() < end:
            time.sleep(max(self._period / 2, detector.world_size / 1024))
            found = detector.read_statuses(store=store)
            ranks = {r for r in ranks if found.get(r) == before.get(r) and not _has_exited(found.get(r))}
        found[detector.rank] = self._status()._replace(published=time.monotonic())
        for rank in ranks:
            text = "it has died, cannot be reached, or something keeps Python from running there"
            found[rank] = RankStatus(rank, "", SILENT, "", text, None, {})
        return dict(sorted(found.items()))

    def translate_error(self, error: Exception, doing: str) -> None:
        """Raise the cause of an error of the process group; return if it is another error.

        Raises:
            CollectiveMismatch: Ranks wait for each other in different calls.
            RankError: With the table of where the ranks are.
        """
        if isinstance(error, torch.AcceleratorError) or _PEER_ERROR.search(str(error)) is None:
            return  # an error of the device; it may be from an earlier operation
        self._store.await_host_exit()
        with suppress(Exception):  # the rank that hosted the store exited
            self._detector.poll_verdict()
        if self._detector.fatal_error is not None:
            raise CollectiveMismatch(self._detector.fatal_error) from error
        try:
            more = f"Where the ranks are:\n{status_table(self.collect_statuses().values())}"
        except StoreTimeout as timeout:
            more = f"This rank {timeout}."
        except Exception:  # the rank that hosted the store exited
            return
        raise RankError(
            f"{doing} failed on rank {self._detector.rank}, since another rank ended or did not join "
            f"({reason_of(error)}). {more}"
        ) from error

    def _run(self) -> None:
        while not self._stopped.wait(self._period):
            try:
                self._poll()
            except Exception as error:
                if not isinstance(error, dist.DistError | OSError):  # else the store ended with the job
                    print_line(f"the watchdog of rank {self._detector.rank} ends, it failed: {error!r}")
                atexit.unregister(self.stop)
                return

    def _poll(self) -> None:
        status, tables, timeout = self._status(), self._tables, None
        try:
            self._detector.publish_status(status, self._store)
            if status.pending:
                self._detector.detect_deadlock(self._store)
            tables = self._store.add("tables", 0)
        except StoreTimeout as error:
            timeout = error
        self._exit_if_deadlocked(status)
        if status.since is None:
            self._next = self._after
        else:
            seconds = time.monotonic() - status.since
            if tables > self._tables:  # another rank has printed one
                self._next = max(self._next, seconds * _REPEAT_FACTOR)
            elif seconds >= max(self._next, self._reported.get(status.verb, 0.0)):
                self._next = seconds * _REPEAT_FACTOR
                if status.verb.startswith("the loader"):
                    self._reported[status.verb] = self._next
                self._print_table(status, seconds, timeout)
        self._tables = max(tables, self._tables)

    def _status(self) -> RankStatus:
        """Return the status of the thread. Called at each poll: must be quick."""
        blocked = self._blocked.poll()
        stalled = None if self._device is None else self._device.poll(self._blocked.unmoved_since)
        if self._detector.waiting is not None:
            return self._detector.waiting
        call, since = blocked or stalled or batch_wait(self._thread) or ("", None)
        report = RankReport(self._detector.rank, call, "", line_of_thread(self._thread))
        status = self._detector.status(report, since)
        if blocked is None or time.monotonic() - blocked[1] < _BLOCKED_S:
            return status
        started, pending = self._detector.torch_collectives(self._thread)
        return status._replace(started=started, pending=pending) if pending else status

    def _exit_if_deadlocked(self, status: RankStatus) -> None:
        """End this process if it is deadlocked in code that cannot raise, and no other rank exits."""
        verdict, now = self._detector.fatal_error, time.monotonic()
        if verdict is None or not status.pending:
            self._deadlocked_since = None
            return
        self._deadlocked_since = self._deadlocked_since or now
        if now - self._deadlocked_since < _END_S and self._detector.can_raise:
            return
        error = CollectiveMismatch(verdict)
        try:
            sys.excepthook(type(error), error, None)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # even if a hook or stream raises: other ranks are blocked until this one exits
            os._exit(1)

    def _print_table(self, status: RankStatus, seconds: float, timeout: StoreTimeout | None) -> None:
        rank = str(status.rank)
        waited = f"rank {rank} has waited {seconds:.0f} s in {status.verb}"
        if timeout is not None:
            where = f"at {status.where} ({VARIABLE}={self._after:g})"
            print_line(f"{waited} {where}, and cannot ask the others: {timeout}.")
        elif (
            self._store.compare_set(f"table/{self._tables}", "", rank) == rank.encode()
        ):  # else another rank does
            self._tables = self._store.add("tables", 1)
            text = status_table(self.collect_statuses().values())
            print_line(f"{waited} ({VARIABLE}={self._after:g}). Where the ranks are:\n{text}")


def _has_exited(status: RankStatus | None) -> bool:
    return status is not None and status.verb == EXITED
