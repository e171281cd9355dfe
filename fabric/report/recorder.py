"""`Recorder`: the seconds of this rank's steps by kind, and the events of its run, appended to a file.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.source import format_line, is_user_code
from fabric.launch.rank_exit import describe, is_secondary_failure
from fabric.report.format import KINDS, pack_event, pack_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabric.report.file import RankFile

DATA, OTHER = KINDS.index("data"), len(KINDS)
_MEMORY_EVERY = 8
"""Steps between two looks at the peak of memory, which takes microseconds."""
_MOST_WARNINGS = 1000
_END = object()
_clock = time.perf_counter


class Recorder:
    """Records the thread that creates it.

    Args:
        file: Of this rank.
        number: The number of the last step of this run, if it was resumed; equal on all ranks.
        facts: For the event "start", which is written with the first step, save, load or failure: by then
            models are set up, and have added `parameters`.
        memory: Returns the peak of memory in KiB.
    """

    stragglers: Any = None
    """The `Stragglers` that compare the ranks; None: there is one rank."""

    def __init__(
        self, file: RankFile, number: int, facts: dict[str, Any], memory: Callable[[], int] | None = None
    ) -> None:
        self.file, self.number, self.facts = file, number, facts
        self.thread, self._pid = threading.get_ident(), os.getpid()
        self.steps = 0
        """Steps of this process."""
        self.seconds = [0.0] * (OTHER + 1)
        """Seconds by kind of KINDS, and of the rest, since the begin."""
        self._at_last_step = self.seconds.copy()
        self._kind, self._since = OTHER, _clock()
        self._begin = self._since
        self._read_memory, self._kibibytes = memory or peak_of_host, 0
        self._optimizer: Callable[[], Any] = lambda: None
        self._early: list[bytes] | None = [b""]
        """The records until "start" is complete, with a place for it; None: it is written."""
        self._begun = time.time()
        self._warnings: set[tuple[str, str]] = set()

    def switch(self, kind: int) -> int:
        """Count the seconds from now on to `kind`, and return the kind until now."""
        now = _clock()
        previous, self._kind = self._kind, kind
        self.seconds[previous] += now - self._since
        self._since = now
        return previous

    def follow(self, optimizer: Any) -> None:
        """Let the steps of this optimizer end steps, unless there is an earlier one."""
        if self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)

    def stepped(self, optimizer: Any) -> None:
        """Write a step, if this optimizer ends steps."""
        if self._optimizer() is not optimizer:
            return
        self.switch(self._kind)
        whole, self._begin = self._since - self._begin, self._since
        if self.steps % _MEMORY_EVERY == 0:
            self._kibibytes = self._read_memory()
        if self._early is not None:
            self._write_start()
        self.number += 1
        self.steps += 1
        seconds = [now - then for now, then in zip(self.seconds, self._at_last_step, strict=True)]
        self._at_last_step = self.seconds.copy()
        self.file.append(pack_step(self.number, time.time() - whole, seconds[:-1], whole, self._kibibytes))
        if self.stragglers is not None:
            self.stragglers.stepped(self)

    def event(self, kind: str, **values: Any) -> None:
        """Write an event, of any thread; in processes that this one forked nothing is written."""
        if os.getpid() != self._pid:
            return
        record = pack_event(kind, time.time(), self.number, **values)
        if self._early is not None and kind == "warning":
            self._early.append(record)
            return
        if self._early is not None:
            self._write_start()
        self.file.append(record)

    def warned(self, text: str, filename: str, lineno: int) -> None:
        """Write a Python warning, each text of a line once."""
        known = text[:500], f"{Path(filename).name}:{lineno}"
        if known not in self._warnings and len(self._warnings) < _MOST_WARNINGS:
            self._warnings.add(known)
            self.event("warning", text=known[0], place=known[1])

    def failed(self, error: BaseException) -> None:
        """Write the failure that ends this rank, with its cause."""

        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)
        ]
        values = {"place": format_line(frames[-1].filename, frames[-1].lineno or 0)} if frames else {}
        if error.__cause__ is not None:
            values["cause"] = describe(error.__cause__)
        secondary = is_secondary_failure(describe(error))
        self.event(
            "failure", error=type(error).__name__, text=str(error)[:4000], secondary=secondary, **values
        )

    def batches(self, begin: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """Return the iterator `begin(loader)`, with the seconds that the loop waits for it counted."""
        previous = self.switch(DATA)
        if not self.steps:  # work between setup and the loop belongs to no step
            self._begin, self._at_last_step = self._since, self.seconds.copy()
        self.facts.setdefault("batch_size", getattr(loader, "batch_size", None))
        try:
            found = begin(loader)
        finally:
            self.switch(previous)
        return self._received(found, loader, torch.is_grad_enabled())

    def _received(self, batches: Iterator[Any], loader: Any, trains: bool) -> Iterator[Any]:
        epoch = loader._epoch - 1
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

    def _write_start(self) -> None:
        start = pack_event("start", self._begun, self.number, **self.facts)
        early, self._early = self._early or [], None
        for record in [start, *early[1:]]:
            self.file.append(record)

    def close(self) -> None:
        """Close the file."""
        if os.getpid() == self._pid:
            self.file.close()


def peak_of_host() -> int:
    """Return the largest resident size of this process until now, in KiB."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size // 1024 if sys.platform == "darwin" else size


def memory_reader(device: torch.device) -> Callable[[], int]:
    """Return the function that reads the peak of memory in KiB: of the device's allocator, or of the host."""
    peak = getattr(getattr(torch, device.type, None), "max_memory_allocated", None)
    return peak_of_host if peak is None else lambda: int(peak(device)) // 1024
