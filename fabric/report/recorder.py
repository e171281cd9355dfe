"""`StepRecorder`: the seconds of this rank's steps by kind, and the events of its run, appended to a file.

One clock, which always counts to one kind: a nested region (a wait in a backward) counts to the inner kind
only, so that the kinds and the rest add up to the step. Nothing here waits for a device.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
import traceback
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.source import format_line, is_user_code
from fabric.launch.parent_death import ReportedExit
from fabric.launch.rank_exit import describe, is_secondary_failure, message_of
from fabric.report.flops import FlopCounter, counts_flops
from fabric.report.format import KINDS, pack_event, pack_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabric.report.file import RankFile

DATA, OTHER = KINDS.index("data"), len(KINDS)
_MEMORY_EVERY = 8
"""Steps between two reads of the memory peak, each of which takes microseconds."""
_COUNTED_STEP = 2
"""The step whose floating-point operations are counted, from 0: kernels of the first are often others."""
_MOST_ONCE = 1000
"""Most warnings that are recorded."""
_END = object()
_clock = time.perf_counter


class StepRecorder:
    """Records the thread that creates it.

    Args:
        file: The file of this rank.
        number: The number of the last step of this run, if it was resumed; equal on all ranks.
        facts: Values of the event "start". It is written before the first step or event (other than
            warnings), when the setup of models has added `parameters`.
        device: The device whose memory is recorded.
    """

    flops: FlopCounter | None = None
    """Counts the operations of forwards and backwards of the current step; None: of no step."""
    stragglers: Any = None
    """The `Stragglers` that compare the ranks; None: there is one rank."""

    def __init__(
        self, file: RankFile, number: int, facts: dict[str, Any], device: torch.device | None = None
    ) -> None:
        self.file, self.number, self.facts = file, number, facts
        self.thread, self._pid = threading.get_ident(), os.getpid()
        self.steps = 0
        """Steps of this process."""
        self.seconds = [0.0] * (OTHER + 1)
        """Seconds by kind of KINDS, and of the rest, since the begin."""
        self.since = self._begin = _clock()
        """The time of the last switch."""
        self._at_last_step, self._kind = self.seconds.copy(), OTHER
        self._device, self._kibibytes = device, 0
        self._optimizer: Callable[[], Any] = lambda: None
        self._early: list[bytes] | None = []
        """Warnings before "start" is written; None: it is written."""
        self._launched, self._once = time.time(), set[Any]()

    def switch(self, kind: int) -> int:
        """Count the seconds from now on to `kind`, and return the kind until now."""
        now = _clock()
        previous, self._kind = self._kind, kind
        self.seconds[previous] += now - self.since
        self.since = now
        return previous

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose seconds are not counted."""
        kind = self.switch(OTHER)
        begin = self.since
        try:
            yield
        finally:
            self._kind, self.since = kind, _clock()
            self._begin += self.since - begin

    def set_step_optimizer(self, optimizer: Any) -> None:
        """Count a step of this optimizer as a step of the run, unless an earlier optimizer does."""
        if self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)

    def stepped(self, optimizer: Any) -> None:
        """Write a step, if the steps of this optimizer are those of the run."""
        if self._optimizer() is not optimizer:
            return
        whole, self._begin = self.since - self._begin, self.since
        if self.steps % _MEMORY_EVERY == 0:
            self._kibibytes = peak_memory(self._device)
        self._write_start()
        self.number += 1
        self.steps += 1
        seconds = [now - then for now, then in zip(self.seconds, self._at_last_step, strict=True)]
        self._at_last_step = self.seconds.copy()
        self.file.append(pack_step(self.number, time.time() - whole, seconds[:-1], whole, self._kibibytes))
        if self.flops is not None and self.flops.flops > 0:
            self.event("flops", flops=self.flops.flops)
        self.flops = FlopCounter() if self.steps == _COUNTED_STEP and counts_flops() else None
        if self.stragglers is not None:
            self.stragglers.stepped(self)

    def event(self, kind: str, **values: Any) -> None:
        """Write an event, from any thread. Forked children of this process write nothing."""
        if os.getpid() != self._pid:
            return
        if kind != "warning":
            self._write_start()
        write = self.file.append if self._early is None else self._early.append
        write(pack_event(kind, time.time(), self.number, **values))

    def event_once(self, kind: str, **values: str) -> None:
        """Write an event, unless there was an equal one."""
        if (key := (kind, *values.values())) not in self._once and len(self._once) < _MOST_ONCE:
            self._once.add(key)
            self.event(kind, **values)

    def _write_start(self) -> None:
        if self._early is not None:
            early, self._early = self._early, None
            for record in [pack_event("start", self._launched, self.number, **self.facts), *early]:
                self.file.append(record)

    def end(self, error: BaseException | None) -> None:
        """Write the end, or the failure with its cause, and close the file."""
        if error is None:
            self.event("end")
        else:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_code(f.filename)]
            name = type(error).__name__
            if isinstance(error, ReportedExit):
                name, (file, _, line) = "SystemExit", error.place.rpartition(":")
                frames = [traceback.FrameSummary(file, int(line), "", lookup_line=False)]
            values = {"error": name, "text": message_of(error)[:4000]}
            if frames:
                values["place"] = format_line(frames[-1].filename, frames[-1].lineno or 0)
            if error.__cause__ is not None:
                values["cause"] = describe(error.__cause__)
            secondary = getattr(error, "is_secondary", False) or is_secondary_failure(describe(error))
            self.event("failure", **values, secondary=secondary)
        if os.getpid() == self._pid:
            self.file.close()

    def batches(self, begin: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """Return the iterator `begin(loader)`, with the seconds that the loop waits for it counted."""
        previous = self.switch(DATA)
        if not self.steps:  # work between setup and the loop belongs to no step
            self._begin, self._at_last_step = self.since, self.seconds.copy()
        self.facts.setdefault("batch_size", getattr(loader, "batch_size", None))
        try:
            found = begin(loader)
        finally:
            self.switch(previous)
        return self._received(found, loader._epoch - 1, torch.is_grad_enabled())

    def _received(self, batches: Iterator[Any], epoch: int, trains: bool) -> Iterator[Any]:
        while True:
            previous = self.switch(DATA)
            try:
                batch = next(batches, _END)
            finally:
                self.switch(previous)
            if batch is _END:
                break
            yield batch
        if trains:
            self.event("epoch", epoch=epoch)


def peak_memory(device: torch.device | None) -> int:
    """Return the peak in KiB of a device's allocator, or of this process where a device has none."""
    peak = (
        None if device is None else getattr(getattr(torch, device.type, None), "max_memory_allocated", None)
    )
    if peak is not None:
        return int(peak(device)) // 1024
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size // 1024 if sys.platform == "darwin" else size
