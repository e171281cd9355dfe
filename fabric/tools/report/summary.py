"""A run in numbers and words, as values of JSON: `summarize`. Called by the other modules of this folder."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.messages import name_ranks
from fabric.report.format import KINDS
from fabric.tools.report.aggregate import COUNT, WHOLE, day

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.tools.report.aggregate import RankAggregate, RunAggregate

NAMES = (*KINDS, "other")
_WAITS = [NAMES.index("communication"), NAMES.index("checkpoint")]
"""Kinds of seconds in which a rank waits for other ranks, or writes for all."""
_SLOWER, _WINDOW, _LEAST = 1.15, 100, 20
"""Factor by which a straggler is slower than the median, window of steps, least number of steps."""
_EVENT = ("kind", "time", "rank", "step", "count", "seconds", "text")
_FACTS = ("script", "strategy", "precision", "accelerator", "parameters", "batch_size", "versions")


def summarize(run: RunAggregate) -> dict[str, Any]:
    """Return the numbers and findings of a run as values of JSON."""
    ranks, entries = zip(*sorted(run.written().items()), strict=True)
    sums, peaks = torch.stack([one.sums for one in entries]), torch.stack([one.peaks for one in entries])
    seconds, counts = per_step(sums.sum(1)), sums[:, :, COUNT].sum(1).int().tolist()
    begin, end = min([one.begin for one in entries]), max([one.end for one in entries])
    curves, failures = _curves(run, ranks, sums, peaks), _failures(run)
    tops = (1024 * peaks[:, :, 1].amax(1)).tolist()
    by_rank = zip(ranks, entries, counts, tops, seconds.tolist(), strict=True)
    size = max([max(one.world_sizes, default=1) for one in entries])
    missing = [rank for rank in range(size) if rank not in ranks]
    notes = [f"Of {size} ranks, {name_ranks(missing)} left no record here."] * bool(missing)
    notes += [f"{name} was not finite, first in step {step:,}." for name, step in run.not_finite.items()]
    events = [dict(zip(_EVENT, (kind, *event), strict=True)) for (kind, _, _), event in run.events.items()]
    return {
        "directory": str(run.directory),
        "state": "running" if run.is_alive() else "failed" if failures else "ended",
        **{name: entries[0].start[name] for name in _FACTS if name in entries[0].start},
        "ranks": len(ranks),
        "hosts": len({one.host for one in entries}),
        "begin": day(begin),
        "end": day(end),
        "seconds": end - begin,
        "attempts": max([one.starts for one in entries]),
        "steps": max(counts),
        "last_step": max([one.last_step for one in entries]),
        "steps_per_second": max(counts) / max(end - begin, 1e-9),
        **_rates([*entries], seconds[:, 0].tolist()),
        "seconds_per_step": dict(zip(("step", *NAMES), seconds.nanmean(0).tolist(), strict=True)),
        "failures": failures,
        "stragglers": find_stragglers(run, list(ranks), sums),
        "notes": notes,
        "by_rank": [
            {"rank": rank, "host": one.host, "state": one.state, "steps": count, "peak_memory": top}
            | dict(zip(("step", *NAMES), row, strict=True))
            for rank, one, count, top, row in by_rank
        ],
        "steps_per_bin": run.width,
        "curves": curves,
        "events": sorted(events, key=lambda event: event["time"]),
    }


def _rates(entries: list[RankAggregate], seconds: list[float]) -> dict[str, float]:
    """Return the FLOP/s of a rank, as the mean, and MFU. Missing if a rank's operations or peak are unknown.

    Args:
        entries: The ranks.
        seconds: The mean seconds of a step of each.
    """
    rates = [one.flops / each for one, each in zip(entries, seconds, strict=True) if one.flops and each]
    if len(rates) < len(entries):
        return {}
    found = {"flops_per_second": sum(rates) / len(rates)}
    peaks = [float(one.start.get("peak_flops", 0)) for one in entries]
    if all(peaks):
        found["mfu"] = sum([rate / peak for rate, peak in zip(rates, peaks, strict=True)]) / len(rates)
    return found


def per_step(sums: Tensor) -> Tensor:
    """Return seconds per step of the whole step, of each of KINDS, and of the rest; NaN without steps."""
    means = sums[..., WHOLE:] / sums[..., COUNT, None]
    return torch.cat([means, means[..., :1] - means[..., 1:].sum(-1, keepdim=True)], dim=-1)


def find_stragglers(run: RunAggregate, ranks: list[int], sums: Tensor) -> list[dict[str, Any]]:
    """Return the ranks that are slower than the (lower) median outside of communication, and in which steps.

    A rank is slow in windows of `_WINDOW` steps, between the first and the last slow bin of these.
    """
    size = min(-(-_WINDOW // run.width), sums.shape[1])
    until = torch.cat([torch.zeros_like(sums[:, :1]), sums.cumsum(1)], dim=1)
    windows = until[:, size:] - until[:, :-size]
    windows[windows[:, :, COUNT] < _LEAST] = 0
    slow, slow_windows = _are_slow(sums), _are_slow(windows)
    padded = torch.nn.functional.pad(slow_windows.float(), (size - 1, size - 1))
    covered = torch.nn.functional.max_pool1d(padded, size, 1).bool()  # by bin: in any slow window
    found = []
    for index in covered.any(1).nonzero()[:, 0].tolist():
        for is_covered, stretch in groupby(range(sums.shape[1]), covered[index].tolist().__getitem__):
            bins = [place for place in stretch if is_covered and slow[index, place]]
            if not bins:
                continue
            part = sums[:, bins[0] : bins[-1] + 1].sum(1)
            means, entry = per_step(part), run.ranks[ranks[index]]
            busy = busy_seconds(means)
            middle, lost = float(busy.nanmedian()), (means[index] - means.nanmedian(0).values)[1:]
            lost[_WAITS] = 0
            percent = 100 * (float(busy[index]) / middle - 1)
            row: dict[str, Any] = {"rank": ranks[index], "host": entry.host, "percent": percent}
            row |= {"where": NAMES[lost.argmax()], "first_step": max(bins[0] * run.width, 1)}
            row["last_step"] = min((bins[-1] + 1) * run.width - 1, entry.last_step)
            row["seconds_lost"] = float((busy[index] - middle) * part[index, COUNT])
            found += [row] * (percent > 100 * (_SLOWER - 1))
    return sorted(found, key=lambda row: -row["seconds_lost"])


def _are_slow(sums: Tensor) -> Tensor:
    busy = busy_seconds(per_step(sums))
    return busy > _SLOWER * busy.nanmedian(0).values


def busy_seconds(means: Tensor) -> Tensor:
    """Return seconds per step outside of communication and saves, from a result of `per_step`."""
    return means[..., 0] - means[..., [1 + index for index in _WAITS]].sum(-1)


def straggler_texts(rows: list[dict[str, Any]], most: int = 20) -> list[str]:
    """Return a line for each of the stragglers that cost most."""
    lines = []
    for row in rows[:most]:
        where = "outside of the calls of Fabric" if row["where"] == "other" else f"in {row['where']}"
        text = f"rank {row['rank']} on {row['host']}: +{row['percent']:.0f} %, {where}, "
        lines.append(f"{text}steps {row['first_step']:,}-{row['last_step']:,}")
    return lines + [f"and {len(rows) - most} more: --json has all"] * (len(rows) > most)


def _curves(run: RunAggregate, ranks: Any, sums: Tensor, peaks: Tensor) -> dict[str, dict[str, list[Any]]]:
    """Return curves over steps by name: first steps of the bins, means, and extremes or ranks."""
    used = sums[:, :, COUNT].sum(0).nonzero()[:, 0]
    first = (used * run.width).clamp(min=1).tolist()
    steps, peaks = sums[:, used, COUNT], peaks[:, used]
    found: dict[str, dict[str, list[Any]]] = {}
    means = sums[:, used, WHOLE].sum(0) / steps.sum(0), peaks[:, :, 1].sum(0) / (steps > 0).sum(0)
    for index, (name, factor) in enumerate({"step, ms": 1000, "peak memory, MB": 1024 / 1e6}.items()):
        top = peaks[:, :, index].max(0)
        found[name] = {"first_step": first, "mean": (factor * means[index]).tolist()}
        found[name] |= {"most": (factor * top.values).tolist(), "rank": [ranks[one] for one in top.indices]}
    for name in sorted(run.values, key=lambda name: "loss" not in name):
        places, bins = zip(*sorted(run.values[name].items()), strict=True)
        counts, totals, least, most = map(list, zip(*bins, strict=True))
        mean = [total / count for total, count in zip(totals, counts, strict=True)]
        found[name] = {"first_step": [max(place * run.width, 1) for place in places], "mean": mean}
        found[name] |= {"most": most, "least": least}
    return found


def _failures(run: RunAggregate) -> list[str]:
    """Return the failures of ranks in their last attempt, the earliest first."""
    found = []
    for (kind, _, _), (moment, rank, step, count, _, text) in run.events.items():
        if kind == "failure" and moment >= float(run.ranks[rank].start.get("time", 0.0)):
            same = f" (and the same on {count - 1} more)" * (count > 1)
            found.append((moment, f"rank {rank} on {run.ranks[rank].host}, step {step:,}", f"{text}{same}"))
    silent: dict[tuple[int, str], list[int]] = {}
    for rank, one in run.last_attempt().items():
        if one.state == "open" and not run.is_alive():
            silent.setdefault((one.last_step, one.host), []).append(rank)
    for (step, host), ranks in silent.items():
        text = "no later record, and no end: killed, out of memory, a hang, or the machine failed"
        moment = max([run.ranks[rank].end for rank in ranks])
        found.append((moment, f"{name_ranks(ranks)} on {host}, step {step:,}", text))
    return [f"{place}, {day(moment)}: {text}" for moment, place, text in sorted(found)]
