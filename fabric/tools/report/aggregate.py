"""The files of a run as sums and maxima over bins of steps. Called by the other modules of this folder.

A run has at most `BINS` bins: a longer one gets bins of twice as many steps, so memory and pages do not grow.
The maximum of each bin keeps every outlier. One file is in memory at a time.
"""

from __future__ import annotations

import math
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ConfigurationError, UsageError
from fabric.report.format import FILE_NAME, KINDS, STEP, read_from

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.core.types import PathLike

BINS = 320
COUNT, WHOLE = 0, 1
"""Columns of `RankAggregate.sums`: steps and their seconds; the seconds of each of KINDS follow."""
ALIVE_S = 120.0
"""Age in seconds of the newest record above which a run has ended, even without an end in its files."""
_SKEW_S = 3600.0
"""Bound of differences between clocks of machines and between start times of ranks, in seconds."""
_FILE = re.compile(r"rank-(\d{5,})\.bin")
_HEAD = ("error", "text", "name", "path", "what", "place", "where")
"""Fields of an event that are printed without their name; all other fields are printed as "name value"."""
_LEFT_OUT = ("kind", "time", "step", "seconds", "ok", "secondary", "versions")


@dataclass
class RankAggregate:
    """The steps of one rank, and its state by its last events."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(BINS, 2 + len(KINDS)).double())
    peaks: Tensor = field(default_factory=lambda: torch.zeros(BINS, 2).double())
    """By bin: seconds of the longest step, and KiB of memory."""
    position: int = 0
    start: dict[str, Any] = field(default_factory=dict)
    host: str = "an unknown host"
    starts: int = 0
    world_sizes: set[int] = field(default_factory=set)
    state: str = ""
    """"" without records, "open", or the event that ended it: "end" or "failure"."""
    begin: float = math.inf
    end: float = -math.inf
    last_step: int = 0
    flops: float = 0.0
    """Floating-point operations of a step; 0: unknown."""


class RunAggregate:
    """The aggregated files of a directory. `update` reads appended records.

    Raises:
        ConfigurationError: The directory has no files of a run.
    """

    def __init__(self, directory: PathLike) -> None:
        self.directory, self.width = Path(directory), 1
        self.ranks: dict[int, RankAggregate] = {}
        self.events: dict[tuple[str, int, str], tuple[float, int, int, int, float, str]] = {}
        """By kind, bin and text (of failures and warnings): time, rank and step of the first event, number of
        events, largest seconds, text of the first."""
        self.values: dict[str, dict[int, tuple[int, float, float, float]]] = {}
        """By name and bin: number of values, sum, minimum and maximum."""
        self.not_finite: dict[str, int] = {}
        """Names of values that were infinite or NaN, with the first such step."""
        self._check_directory()

    def update(self) -> None:
        """Read the records that ranks appended since the last call.

        Raises:
            ConfigurationError: A file cannot be read.
            UsageError: A file is damaged, of another version or of another run; or there is no record.
        """
        for rank, path in sorted(self._files().items()):
            entry = self.ranks.setdefault(rank, RankAggregate())
            try:
                records, entry.position = read_from(path, entry.position)
            except OSError as error:
                raise ConfigurationError(
                    f"{path} cannot be read: {error.strerror}. The report needs the files of all ranks. "
                    f"Write: chmod a+r {self.directory}/*."
                ) from error
            for record in records:
                if isinstance(record, dict):
                    self._add_event(rank, entry, record)
            if steps := b"".join([record for record in records if isinstance(record, bytes)]):
                self._add_steps(entry, steps)
        self._check_one_run()

    def written(self) -> dict[int, RankAggregate]:
        """Return the ranks that have records."""
        return {rank: entry for rank, entry in self.ranks.items() if entry.state}

    def last_attempt(self) -> dict[int, RankAggregate]:
        """Return the ranks of the last attempt, which may have fewer ranks than the ones before."""
        written = self.written()
        newest = max(written.values(), key=lambda entry: float(entry.start.get("time", 0.0)))
        size = int(newest.start.get("world_size", len(written)))
        return {rank: entry for rank, entry in written.items() if rank < size}

    def is_alive(self, within: float = ALIVE_S) -> bool:
        """Whether a rank has not ended, none has failed, and one wrote within the last `within` seconds."""
        entries = self.last_attempt().values()
        is_recent = time.time() - max([entry.end for entry in entries]) < within
        states = {entry.state for entry in entries}
        return is_recent and "open" in states and "failure" not in states

    def widen(self) -> None:
        """Merge the bins in pairs."""
        self.width *= 2
        for entry in self.ranks.values():
            empty = torch.zeros_like(entry.sums[BINS // 2 :])
            entry.sums = torch.cat([entry.sums.view(BINS // 2, 2, -1).sum(1), empty])
            entry.peaks = torch.cat([entry.peaks.view(BINS // 2, 2, -1).amax(1), empty[:, :2]])
        events, self.events = self.events, {}
        for (kind, place, text), event in events.items():
            self._merge_event((kind, place // 2, text), event)
        values, self.values = self.values, {}
        for name, bins in values.items():
            for place, value in bins.items():
                self._merge_value(name, place // 2, value)

    def _add_steps(self, entry: RankAggregate, steps: bytes) -> None:
        table = torch.frombuffer(bytearray(steps), dtype=torch.uint8).view(-1, STEP.size)
        number, memory = [
            table[:, at : at + 4].reshape(-1).view(torch.int32).long() % 2**32 for at in (4, STEP.size - 4)
        ]
        begin = table[:, 8:16].reshape(-1).view(torch.double)
        seconds = table[:, 16 : STEP.size - 4].reshape(-1).view(torch.float32).view(len(table), -1).double()
        kinds, whole = seconds.split([len(KINDS), 1], dim=1)
        self._fit(int(number.max()))
        where = number // self.width
        entry.sums.index_add_(0, where, torch.cat([torch.ones_like(whole), whole, kinds], dim=1))
        peaks = torch.cat([whole, memory[:, None].double()], dim=1)
        entry.peaks.scatter_reduce_(0, where[:, None].expand(-1, 2), peaks, "amax")
        entry.begin = min(entry.begin, float(begin.min()))
        entry.end = max(entry.end, float((begin + whole[:, 0]).max()))
        entry.last_step, entry.state = int(number[-1]), entry.state or "open"

    def _add_event(self, rank: int, entry: RankAggregate, event: dict[str, Any]) -> None:
        kind, moment, step = str(event.get("kind")), float(event.get("time", 0.0)), int(event.get("step", 0))
        entry.begin, entry.end = min(entry.begin, moment), max(entry.end, moment)
        self._fit(step)
        for name, value in (event.get("values") or {}).items():
            if isinstance(value, int | float) and abs(value) < sys.float_info.max:
                self._merge_value(name, step // self.width, (1, value, value, value))
            elif isinstance(value, float):
                self.not_finite[name] = min(step, self.not_finite.get(name, step))
        if kind == "start":
            entry.start, entry.state, entry.starts = event, "open", entry.starts + 1
            entry.host = str(event.get("hostname", entry.host))
            entry.world_sizes.add(int(event.get("world_size", 1)))
        elif kind in ("end", "failure"):
            entry.state = kind
        elif kind == "flops":
            entry.flops = float(event["flops"])
        if kind not in ("log", "flops"):
            words = [str(event[name]) for name in _HEAD if event.get(name)]
            words += [f"{name} {value}" for name, value in event.items() if name not in _HEAD + _LEFT_OUT]
            text = ", ".join(words)[:400]
            kind += ", not ok" * (event.get("ok") is False) + ", secondary" * bool(event.get("secondary"))
            key = kind, step // self.width, text if kind in ("failure", "warning", "straggler") else ""
            self._merge_event(key, (moment, rank, step, 1, float(event.get("seconds") or 0.0), text))

    def _fit(self, step: int) -> None:
        while step >= BINS * self.width:
            self.widen()

    def _merge_event(self, key: Any, event: tuple[float, int, int, int, float, str]) -> None:
        if (known := self.events.get(key)) is not None:
            # Of failures the last one, which is from the last attempt; of other events the first one.
            first = max(known, event) if key[0].startswith("failure") else min(known, event)
            event = (*first[:3], known[3] + event[3], max(known[4], event[4]), first[5])
        self.events[key] = event

    def _merge_value(self, name: str, place: int, new: tuple[int, float, float, float]) -> None:
        bins = self.values.setdefault(name, {})
        if (old := bins.get(place)) is not None:
            new = (old[0] + new[0], old[1] + new[1], min(old[2], new[2]), max(old[3], new[3]))
        bins[place] = new

    def _files(self) -> dict[int, Path]:
        found = [(_FILE.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return {int(match[1]): path for match, path in found if match}

    def _check_directory(self) -> None:
        given = self.directory
        if not given.is_dir():
            what = "is a file" if given.exists() else f"does not exist (looked in {Path.cwd()})"
            raise ConfigurationError(
                f"The directory {str(given)!r} {what}. A report is made of the files that ranks write into "
                "one directory. Write that of Fabric(report=DIR): fabric report DIR."
            )
        if not self._files():
            found = ", ".join(sorted([path.name for path in given.iterdir()])[:5]) or "nothing"
            raise ConfigurationError(
                f"{given} has no {FILE_NAME.format(0)}, but {found}. No run has written its report there. "
                f"Start one: fabric run --report {given} train.py."
            )

    def _check_one_run(self) -> None:
        if not (written := self.written()):
            raise UsageError(
                f"{self.directory} has {FILE_NAME.format(min(self.ranks))}, but no record in any file. The "
                "run has not made its first step, or was killed before it. Look at its output."
            )
        known, other = written[min(written)], FILE_NAME.format(min(written))
        for rank, entry in written.items():
            why = ""
            if entry.start.get("rank", rank) != rank:
                why = f"was written by rank {entry.start['rank']}"
            elif entry.world_sizes and known.world_sizes and not entry.world_sizes & known.world_sizes:
                sizes = max(entry.world_sizes), max(known.world_sizes)
                why = f"is of a run of {sizes[0]} ranks, and {other} of one of {sizes[1]}"
            elif entry.begin > known.end + _SKEW_S or entry.end < known.begin - _SKEW_S:
                why = f"has records of {day(entry.begin)}, and {other} of {day(known.begin)}"
            if why:
                raise UsageError(
                    f"{self.directory / FILE_NAME.format(rank)} {why}. A report is of one run. Move the "
                    "files of other runs elsewhere, and give each run its own: Fabric(report=DIR)."
                )


def day(seconds: float) -> str:
    """Return the local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
