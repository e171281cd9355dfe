"""A run in numbers and words, as values of JSON: `summarize`. Called by the other modules of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.report.format import KINDS
from fabric.tools.report.aggregate import COUNT, WHOLE, day

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from fabric.tools.report.aggregate import RunAggregate

NAMES = (*KINDS, "other")
WAITS = ("communication", "checkpoint")
"""Seconds in which a rank waits for others, or writes for all."""
_SLOWER, _WINDOW, _LEAST = 1.15, 100, 20
"""A straggler is so many times slower than the median for a window of steps; fewer steps say nothing."""
_MOST_STRAGGLERS = 20
_OF_ONE_RANK = ("kind", "time", "step", "rank", "hostname")


def summarize(run: RunAggregate) -> dict[str, Any]:
    """Return the numbers and findings of a run as values of JSON."""
    ranks = sorted(rank for rank, entry in run.ranks.items() if entry.state != "empty")
    entries = [run.ranks[rank] for rank in ranks]
    sums, peaks = torch.stack([one.sums for one in entries]), torch.stack([one.peaks for one in entries])
    seconds = per_step(sums.sum(1))
    begin, end = min([one.begin for one in entries]), max([one.end for one in entries])
    facts = {name: value for name, value in entries[0].start.items() if name not in _OF_ONE_RANK}
    longest = int(peaks[:, :, 0].argmax())
    place = (longest % peaks.shape[1]) * run.width
    counts = sums[:, :, COUNT].sum(1).int().tolist()
    table = zip(ranks, entries, counts, seconds.tolist(), peaks.amax(1).tolist(), strict=True)
    steps = max(counts)
    known = {name: by_step(run, name) for name in run.values}
    return {
        "directory": str(run.directory),
        "state": "running" if run.is_alive() else "failed" if _failures(run) else "ended",
        **facts,
        "ranks": len(ranks),
        "hosts": len({one.host for one in entries}),
        "begin": day(begin),
        "end": day(end),
        "seconds": round(end - begin, 3),
        "attempts": max([one.starts for one in entries]),
        "steps": steps,
        "last_step": max([one.last_step for one in entries]),
        "steps_per_second": round(steps / max(end - begin, 1e-9), 4),
        "logged_rates": {name: value["last"][-1] for name, value in known.items() if _is_rate(name)},
        "seconds_per_step": dict(zip(["step", *NAMES], _mean(seconds), strict=True)),
        "longest_step": {
            "seconds": float(peaks[:, :, 0].max()),
            "rank": ranks[longest // peaks.shape[1]],
            "steps": [place, place + run.width - 1],
        },
        "peak_memory": float(peaks[:, :, 1].max()) * 1024,
        "failures": _failures(run),
        "stragglers": find_stragglers(run, ranks, sums),
        "notes": _notes(run, ranks),
        "by_rank": [
            {"rank": rank, "host": one.host, "state": one.state, "steps": count, "peak_memory": 1024 * top[1]}
            | {"seconds_per_step": row[0], **dict(zip(NAMES, row[1:], strict=True))}
            for rank, one, count, row, top in table
        ],
        "by_step": by_step_time(run, ranks, sums, peaks),
        "values": known,
        "events": _events(run),
    }


def per_step(sums: Tensor) -> Tensor:
    """Return seconds per step of the whole step, of each of KINDS, and of the rest; NaN without steps."""
    means = sums[..., WHOLE:] / sums[..., COUNT, None]
    return torch.cat([means, means[..., :1] - means[..., 1:].sum(-1, keepdim=True)], dim=-1)


def busy_seconds(means: Tensor) -> Tensor:
    """Return the seconds per step outside of `WAITS`, of what `per_step` returned."""
    return means[..., 0] - means[..., [1 + NAMES.index(name) for name in WAITS]].sum(-1)


def by_step(run: RunAggregate, name: str) -> dict[str, list[float]]:
    """Return the bins of a logged value."""
    bins = sorted(run.values[name].items())
    return {
        "first_step": [place * run.width for place, _ in bins],
        "mean": [one.sum / one.count for _, one in bins],
        "least": [one.least for _, one in bins],
        "most": [one.most for _, one in bins],
        "last": [one.last for _, one in bins],
    }


def by_step_time(run: RunAggregate, ranks: list[int], sums: Tensor, peaks: Tensor) -> dict[str, Any]:
    """Return the bins of all ranks: seconds of a step and memory, with the rank that has the most."""
    used = sums[:, :, COUNT].sum(0).nonzero()[:, 0]
    total = sums.sum(0)[used]
    longest, memory = peaks[:, used, 0].max(0), peaks[:, used, 1].max(0)
    return {
        "steps_per_bin": run.width,
        "first_step": (used * run.width).tolist(),
        "seconds": (total[:, WHOLE] / total[:, COUNT]).tolist(),
        "longest": longest.values.tolist(),
        "longest_rank": [ranks[index] for index in longest.indices],
        "memory": (1024 * memory.values).tolist(),
        "memory_rank": [ranks[index] for index in memory.indices],
        "mean_memory": (1024 * peaks[:, used, 1].sum(0) / (sums[:, used, COUNT] > 0).sum(0)).tolist(),
    }


def find_stragglers(run: RunAggregate, ranks: list[int], sums: Tensor) -> list[dict[str, Any]]:
    """Return the ranks that are slower than the (lower) median outside of communication, and in which steps.

    Seconds are compared in windows of `_WINDOW` steps; then the first and the last slow bin are looked for.
    """
    size = -(-_WINDOW // run.width)
    windows = torch.stack([part.sum(1) for part in sums.split(size, dim=1)], dim=1)
    windows[windows[:, :, COUNT] < _LEAST] = 0
    slow_windows, slow_bins = _are_slow(per_step(windows)), _are_slow(per_step(sums))
    means = per_step(sums)
    busy, middles = busy_seconds(means), means.nanmedian(0).values
    middle, found = busy.nanmedian(0).values, []
    for index in slow_windows.any(1).nonzero()[:, 0].tolist():
        marks = slow_bins[index].tolist()
        for window, last_window in _stretches(slow_windows[index].tolist()):
            first, last = _slow_span(marks, window * size, min((last_window + 1) * size, len(marks)) - 1)
            part = slice(first, last + 1)
            steps = sums[index, part, COUNT]
            lost = ((busy[index, part] - middle[part]) * steps).nansum()
            excess = ((means[index, part] - middles[part]) * steps[:, None]).nansum(0)[1:]
            excess[[NAMES.index(name) for name in WAITS]] = 0
            row: dict[str, Any] = {"rank": ranks[index], "host": run.ranks[ranks[index]].host}
            row |= {"percent": round(100 * float(lost / (middle[part] * steps).nansum()))}
            row |= {"where": NAMES[int(excess.argmax())], "seconds_lost": float(lost)}
            row["first_step"] = max(first * run.width, 1)
            row["last_step"] = min((last + 1) * run.width - 1, run.ranks[ranks[index]].last_step)
            found.append(row)
    return sorted(found, key=lambda row: -row["seconds_lost"])


def _are_slow(means: Tensor) -> Tensor:
    busy = busy_seconds(means)
    return busy > _SLOWER * busy.nanmedian(0).values


def _slow_span(marks: list[bool], first: int, last: int) -> tuple[int, int]:
    """Return the first and the last slow bin of a slow window, and of those that follow it without a gap."""
    within = [index for index in range(first, last + 1) if marks[index]] or [first, last]
    first, last = within[0], within[-1]
    while first > 0 and marks[first - 1]:
        first -= 1
    while last + 1 < len(marks) and marks[last + 1]:
        last += 1
    return first, last


def slowest_rank(means: Tensor, ranks: list[int]) -> list[str]:
    """Return a line for the slowest rank, if it is slower than the median by 15 %."""
    busy = busy_seconds(means).nan_to_num(0)
    index, middle = int(busy.argmax()), float(busy.median())
    percent = 100 * (float(busy[index]) / middle - 1) if middle > 0 else 0.0
    return [f"rank {ranks[index]}: +{percent:.0f} %"] * (percent > 100 * (_SLOWER - 1))


def straggler_texts(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each of the stragglers that cost most."""
    lines = []
    for row in rows[:_MOST_STRAGGLERS]:
        where = "outside of the calls of Fabric" if row["where"] == "other" else f"in {row['where']}"
        steps = f"steps {row['first_step']:,}-{row['last_step']:,}"
        lines.append(f"rank {row['rank']} on {row['host']}: +{row['percent']} %, {where}, {steps}")
    more = len(rows) - len(lines)
    return lines + [f"and {more} more, each of them shorter: --json has all"] * bool(more)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    several = len(spans) > 1 or spans[0][0] != spans[0][1]
    return f"rank{'s' * several} {', '.join(texts[:8])}{', ...' * (len(texts) > 8)}"


def _failures(run: RunAggregate) -> list[str]:
    """Return what ended ranks of the last attempt, the earliest first."""
    found = []
    for (kind, _, _), group in run.events.items():
        if kind == "failure" and group.time >= float(run.ranks[group.rank].start.get("time", 0.0)):
            same = f" (and the same on {group.count - 1} more)" if group.count > 1 else ""
            place = f"rank {group.rank} on {run.ranks[group.rank].host}, step {group.step:,}"
            found.append((group.time, f"{place}, {day(group.time)}: {group.text}{same}"))
    if not run.is_alive():
        silent: dict[tuple[int, str], list[int]] = {}
        for rank, one in run.ranks.items():
            if one.state == "open":
                silent.setdefault((one.last_step, one.host), []).append(rank)
        for (step, host), ranks in silent.items():
            moment = max([run.ranks[rank].end for rank in ranks])
            words = (
                "no end, failure or later record: killed, out of memory, a hang, or a failure of the machine"
            )
            place = f"{name_ranks(ranks)} on {host}, step {max(step, 0):,}"
            found.append((moment, f"{place}, {day(moment)}: {words}"))
    return [text for _, text in sorted(found)]


def _notes(run: RunAggregate, ranks: list[int]) -> list[str]:
    notes = []
    size = max([max(run.ranks[rank].world_sizes, default=1) for rank in ranks])
    if missing := set(range(size)) - set(ranks):
        notes.append(f"Of {size} ranks, {name_ranks(missing)} left no record here.")
    notes += [f"{name} was not finite, first in step {step:,}." for name, step in run.not_finite.items()]
    return notes


def _events(run: RunAggregate) -> list[dict[str, Any]]:
    rows = [(group.time, kind, group) for (kind, _, _), group in run.events.items()]
    return [
        {"kind": kind, "time": moment, "step": one.step, "rank": one.rank, "count": one.count}
        | {"seconds": one.seconds, "text": one.text}
        for moment, kind, one in sorted(rows, key=lambda row: row[0])
    ]


def _stretches(marks: list[bool]) -> list[tuple[int, int]]:
    """Return (first, last) of each row of true values."""
    found: list[tuple[int, int]] = []
    for index, mark in enumerate(marks):
        if mark and found and found[-1][1] == index - 1:
            found[-1] = (found[-1][0], index)
        elif mark:
            found.append((index, index))
    return found


def _mean(rows: Tensor) -> list[float]:
    return rows.nanmean(0).tolist()


def _is_rate(name: str) -> bool:
    return name.endswith(("per_sec", "mfu"))
