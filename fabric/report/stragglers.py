"""`Stragglers`: compares the ranks' seconds outside of communication each 100 steps, and warns once.

Sums are sent through the store of the process group: a small message to rank zero's host per rank and 100
steps. A collective is impossible, since ranks of a correct loop may make different numbers of steps.
"""

from __future__ import annotations

import json
import socket
import warnings
from contextlib import suppress
from statistics import median_low
from typing import Any, NamedTuple

from fabric.core.source import library_frames
from fabric.report.format import KINDS

STEPS = 100
SLOWER = 0.15
"""Fraction by which a straggler is slower than the median."""
_NAMES = (*KINDS, "other")
_BUSY = [index for index, name in enumerate(_NAMES) if name not in ("communication", "checkpoint")]
_PLACES = {"other": "outside of the calls of Fabric"}


class Straggler(NamedTuple):
    """A rank that is slower than the median of all."""

    rank: int
    hostname: str
    percent: int
    where: str
    """The kind with the largest difference."""

    def __str__(self) -> str:
        place = _PLACES.get(self.where, f"in {self.where}")
        return f"rank {self.rank} on {self.hostname}: {self.percent:+d} %, {place}"


def find_stragglers(rows: dict[int, tuple[str, list[float]]]) -> list[Straggler]:
    """Return the ranks whose seconds outside of communication and saves exceed the median by `SLOWER`.

    The lower median: of two ranks, the slower one is compared with the faster one.

    Args:
        rows: For each rank its host and its seconds by kind, with the rest last.
    """
    busy = {rank: sum([seconds[kind] for kind in _BUSY]) for rank, (_, seconds) in rows.items()}
    middle = median_low(busy.values())
    middles = {kind: median_low([seconds[kind] for _, seconds in rows.values()]) for kind in _BUSY}
    found = []
    for rank, (hostname, seconds) in rows.items():
        if busy[rank] > (1 + SLOWER) * middle > 0:
            worst = max(_BUSY, key=lambda kind: seconds[kind] - middles[kind])
            percent = round(100 * (busy[rank] / middle - 1))
            found.append(Straggler(rank, hostname, percent, _NAMES[worst]))
    return found


class Stragglers:
    """One rank's part in the comparison; the first rank of the group reads, compares and warns.

    Args:
        store: The store of the process group.
        prefix: Prefix of the keys, equal on all ranks, and different for each run.
        rank: Rank in the group.
        ranks: For each rank of the group, its rank in the job.
    """

    def __init__(self, store: Any, prefix: str, rank: int, ranks: list[int]) -> None:
        self._store, self._prefix, self._rank, self._ranks = store, prefix, rank, ranks
        self._sums = [0.0] * len(_NAMES)
        self._windows: dict[int, list[float]] = {}
        """Seconds by kind in the last two windows of `STEPS` steps: not all ranks have written the newest."""
        self._compared = 0
        self._known: set[tuple[int, str]] = set()

    def stepped(self, recorder: Any) -> None:
        """Send the sums after each `STEPS` steps, and on the first rank compare those of all."""
        if recorder.steps % STEPS or self._store is None:
            return
        before, self._sums = self._sums, recorder.seconds.copy()
        window = recorder.steps // STEPS
        self._windows[window] = [now - then for now, then in zip(self._sums, before, strict=True)]
        self._windows.pop(window - 2, None)
        value, texts = json.dumps([socket.gethostname(), [*self._windows.items()]]), []
        keys = [f"{self._prefix}/{rank}" for rank in range(len(self._ranks))]
        try:
            self._store.set(keys[self._rank], value)
            if self._rank == 0 and self._store.check(keys):
                texts = self._store.multi_get(keys)
        except RuntimeError:  # the rank that hosts the store has exited
            self._store = None
        if texts:
            self._compare([json.loads(text) for text in texts], recorder)

    def _compare(self, rows: list[Any], recorder: Any) -> None:
        windows = [dict(windows) for _, windows in rows]
        common = max(set.intersection(*[{*known} for known in windows]), default=0)
        if common <= self._compared:
            return
        self._compared = common
        held = zip(self._ranks, rows, windows, strict=True)
        for one in find_stragglers({rank: (row[0], known[common]) for rank, row, known in held}):
            if (one.rank, one.where) not in self._known:
                self._known.add((one.rank, one.where))
                recorder.event("straggler", **one._asdict(), steps=STEPS)
                text = f"{one} (of the median's seconds outside of communication, in {STEPS} steps)."
                with suppress(Warning):  # also where warnings are errors: on one rank only
                    warnings.warn(
                        f"{text} The other ranks wait for it. Shown once per rank and cause.",
                        stacklevel=library_frames() + 1,
                    )
