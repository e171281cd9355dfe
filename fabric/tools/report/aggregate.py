"""The files of a run as sums and maxima over bins of steps. Called by the other modules of this folder.

A run has at most `BINS` bins: a longer one gets bins of twice as many steps, so memory and pages do not grow.
The maximum of each bin keeps every outlier. One file is in memory at a time.
"""

from __future__ import annotations

import math
import re
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
COUNT, WHOLE, FIRST_KIND = 0, 1, 2
"""Columns of `RankAggregate.sums`: steps, their seconds, then the seconds of each of KINDS."""
ALIVE_S = 120.0
"""A run whose newest record is older has ended, whatever its files say."""
_SKEW_S = 3600.0
"""Clocks of machines, and the time between the starts of ranks, differ by less."""


@dataclass
class RankAggregate:
    """The steps of one rank, and what its last events say of it."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(BINS, FIRST_KIND + len(KINDS)).double())
    peaks: Tensor = field(default_factory=lambda: torch.zeros(BINS, 2).double())
    """By bin: seconds of the longest step, and KiB of memory."""
    position: int = 0
    start: dict[str, Any] = field(default_factory=dict)
    starts: int = 0
    world_sizes: set[int] = field(default_factory=set)
    state: str = "empty"
    """"empty", "open", or the event that ended it: "end" or "failure"."""
    begin: float = math.inf
    end: float = -math.inf
    last_step: int = -1

    @property
    def host(self) -> str:
        """The name of its machine."""
        return str(self.start.get("hostname", "an unknown host"))


@dataclass
class EventGroup:
    """Events of one kind in one bin of steps; failures and warnings only with the same text."""

    count: int
    rank: int
    step: int
    time: float
    seconds: float
    text: str

    def merge(self, other: EventGroup) -> None:
        """Add the events of another group; the earliest event is the one that is shown."""
        count, seconds = self.count + other.count, max(self.seconds, other.seconds)
        if other.time < self.time:
            self.rank, self.step, self.time, self.text = other.rank, other.step, other.time, other.text
        self.count, self.seconds = count, seconds


@dataclass
class ValueBin:
    """A logged value in one bin of steps."""

    count: int
    sum: float
    least: float
    most: float
    last: float

    def merge(self, other: ValueBin) -> None:
        """Add what was logged later."""
        self.count, self.sum, self.last = self.count + other.count, self.sum + other.sum, other.last
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)


class RunAggregate:
    """The aggregated files of a directory. `update` reads what was appended.

    Raises:
        ConfigurationError: It has no files of a run, or those of several runs.
    """

    def __init__(self, directory: PathLike) -> None:
        self.directory = Path(directory)
        self.width = 1
        """Steps of a bin."""
        self.ranks: dict[int, RankAggregate] = {}
        self.events: dict[tuple[str, int, str], EventGroup] = {}
        self.values: dict[str, dict[int, ValueBin]] = {}
        self.not_finite: dict[str, int] = {}
        """Names of values that were infinite or NaN, with the first such step."""
        self._check_directory()

    def update(self) -> int:
        """Read what ranks appended since the last call and return the number of bytes.

        Raises:
            ConfigurationError: The files are of several runs, or cannot be read.
            UsageError: A file is damaged, or of another version.
        """
        size = 0
        for rank, path in sorted(_files(self.directory).items()):
            entry = self.ranks.setdefault(rank, RankAggregate())
            try:
                records, position = read_from(path, entry.position)
            except OSError as error:
                raise ConfigurationError(
                    f"{path} cannot be read: {error.strerror}. The report needs the files of all ranks. "
                    f"Write: chmod a+r {self.directory}/*."
                ) from error
            size += position - entry.position
            entry.position = position
            self._add(rank, entry, records)
        self._check_one_run()
        return size

    def is_alive(self, within: float = ALIVE_S) -> bool:
        """Whether a rank has neither ended nor failed, and one wrote within so many seconds."""
        entries = [entry for entry in self.ranks.values() if entry.state != "empty"]
        is_recent = time.time() - max([entry.end for entry in entries]) < within
        return is_recent and any([entry.state == "open" for entry in entries])

    def _add(self, rank: int, entry: RankAggregate, records: list[bytes | dict[str, Any]]) -> None:
        steps = []
        for record in records:
            if isinstance(record, bytes):
                steps.append(record)
            else:
                self._add_event(rank, entry, record)
        if steps:
            self._add_steps(entry, b"".join(steps))

    def _add_steps(self, entry: RankAggregate, steps: bytes) -> None:
        table = torch.frombuffer(bytearray(steps), dtype=torch.uint8).view(-1, STEP.size)
        number = table[:, 4:8].contiguous().view(torch.int32)[:, 0].long() & 0xFFFFFFFF
        begin = table[:, 8:16].contiguous().view(torch.double)[:, 0]
        seconds = table[:, 16 : STEP.size - 4].contiguous().view(torch.float32).double()
        memory = table[:, STEP.size - 4 :].contiguous().view(torch.int32)[:, 0].long() & 0xFFFFFFFF
        kinds, whole = seconds.split([len(KINDS), 1], dim=1)
        where = self._bin(int(number.max()), number)
        entry.sums.index_add_(0, where, torch.cat([torch.ones_like(whole), whole, kinds], dim=1))
        longest = torch.cat([whole, memory[:, None].double()], dim=1)
        entry.peaks.scatter_reduce_(0, where[:, None].expand(-1, 2), longest, "amax")
        entry.begin = min(entry.begin, float(begin.min()))
        entry.end = max(entry.end, float((begin + whole[:, 0]).max()))
        entry.last_step = int(number[-1])
        entry.state = "open" if entry.state == "empty" else entry.state

    def _add_event(self, rank: int, entry: RankAggregate, event: dict[str, Any]) -> None:
        kind, moment, step = str(event.get("kind")), float(event.get("time", 0.0)), int(event.get("step", 0))
        entry.begin, entry.end = min(entry.begin, moment), max(entry.end, moment)
        if kind == "log":
            self._add_values(step, event.get("values") or {})
            return
        if kind == "start":
            entry.start, entry.state, entry.starts = event, "open", entry.starts + 1
            entry.world_sizes.add(int(event.get("world_size", 1)))
        elif kind in ("end", "failure"):
            entry.state = kind
        text = _text_of(event)
        name = kind if event.get("ok", True) else f"{kind}, not ok"
        name = "secondary failure" if event.get("secondary") else name
        by_text = text if kind in ("failure", "warning", "straggler") else ""
        group = EventGroup(1, rank, step, moment, float(event.get("seconds") or 0.0), text)
        place = self._bin(step, step)
        _merge(self.events, (name, place, by_text), group)

    def _add_values(self, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value):
                self.not_finite[name] = min(step, self.not_finite.get(name, step))
                continue
            place = self._bin(step, step)
            _merge(self.values.setdefault(name, {}), place, ValueBin(1, value, value, value, value))

    def _bin(self, largest: int, steps: Any) -> Any:
        """Return the bins of steps, after bins have become wide enough for the largest."""
        while largest >= BINS * self.width:
            self.width *= 2
            for entry in self.ranks.values():
                empty = torch.zeros_like(entry.sums[BINS // 2 :])
                entry.sums = torch.cat([entry.sums.view(BINS // 2, 2, -1).sum(1), empty])
                entry.peaks = torch.cat([entry.peaks.view(BINS // 2, 2, -1).amax(1), empty[:, :2]])
            events, self.events = self.events, {}
            for (kind, place, text), group in events.items():
                _merge(self.events, (kind, place // 2, text), group)
            for name, bins in self.values.items():
                self.values[name] = {}
                for place, value in sorted(bins.items()):
                    _merge(self.values[name], place // 2, value)
        return steps // self.width

    def _check_directory(self) -> None:
        given = self.directory
        if not given.exists():
            raise ConfigurationError(
                f"The directory {str(given)!r} does not exist (looked in {Path.cwd()}). A report is made of "
                "the files that a run writes. Write the directory of Fabric(report=DIR): fabric report DIR."
            )
        if not given.is_dir():
            raise ConfigurationError(
                f"{given} is a file. A run has a directory with a file of each rank. "
                f"Write: fabric report {given.parent}."
            )
        if not _files(given):
            found = ", ".join(sorted([path.name for path in given.iterdir()])[:5]) or "nothing"
            raise ConfigurationError(
                f"{given} has no {FILE_NAME.format(0)}, but {found}. No run has written its report there. "
                f"Start one: fabric run --report {given} train.py."
            )

    def _check_one_run(self) -> None:
        begun = {rank: entry for rank, entry in self.ranks.items() if entry.state != "empty"}
        if not begun:
            raise UsageError(
                f"{self.directory} has {FILE_NAME.format(min(self.ranks))}, but no record in any file. The "
                "run has not made its first step, or was killed before it. Look at its output."
            )
        first, known = min(begun.items(), key=lambda item: item[0])
        for rank, entry in begun.items():
            why, other = "", FILE_NAME.format(first)
            if (written := entry.start.get("rank", rank)) != rank:
                why = f"was written by rank {written}"
            elif entry.world_sizes and known.world_sizes and not entry.world_sizes & known.world_sizes:
                sizes = max(entry.world_sizes), max(known.world_sizes)
                why = f"is of a run of {sizes[0]} ranks, and {other} of one of {sizes[1]}"
            elif (script := entry.start.get("script")) != known.start.get("script"):
                why = f"is of the script {script}, and {other} of {known.start.get('script')}"
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


def _files(directory: Path) -> dict[int, Path]:
    found = [(re.fullmatch(r"rank-(\d{5,})\.bin", path.name), path) for path in directory.iterdir()]
    return {int(match[1]): path for match, path in found if match}


def _merge(table: dict[Any, Any], key: Any, value: Any) -> None:
    if key in table:
        table[key].merge(value)
    else:
        table[key] = value


def _text_of(event: dict[str, Any]) -> str:
    head = ": ".join([str(event[name]) for name in ("error", "text") if event.get(name)])
    known = ("kind", "time", "step", "seconds", "ok", "error", "text", "secondary", "versions")
    fields = {name: value for name, value in event.items() if name not in known}
    plain = ("name", "path", "place", "where")
    words = [str(value) if name in plain else f"{name} {value}" for name, value in fields.items()]
    return ", ".join([head] * bool(head) + words)[:400]
