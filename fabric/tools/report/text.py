"""A run as lines for a terminal: the whole run, or a line a minute while it runs. Called by `command.py`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from fabric.tools.report.aggregate import ALIVE_S, COUNT
from fabric.tools.report.summary import NAMES, busy_seconds, per_step, straggler_texts, summarize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fabric.tools.report.aggregate import RunAggregate

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH, _MOST_ROWS, _MOST_EVENTS = 60, 12, 40
_QUIET = ("start", "end", "check")
_PAUSE_S = 1800.0


def as_text(summary: dict[str, Any]) -> str:
    """Return the report as tables and lines of bars."""
    names = max([len(name) for name in summary["curves"]]) + 9
    curves = []
    for name, curve in summary["curves"].items():
        shown = {name: curve["mean"]} | ({f"{name}, most": curve["most"]} if "rank" in curve else {})
        curves += [f"{title:{names}}  {sparkline(values)}" for title, values in shown.items() if values]
    events = [event_text(row) for row in summary["events"] if row["kind"] not in _QUIET]
    parts = {
        f"fabric report {summary['directory']}: {headline(summary)}": facts(summary),
        "failures": summary["failures"],
        "stragglers": straggler_texts(summary["stragglers"]),
        "notes": summary["notes"],
        "where the time goes, milliseconds per step": _table(summary),
        f"by step, up to step {summary['last_step']:,}": curves,
        f"events{', the last ones' * (len(events) > _MOST_EVENTS)}": events[-_MOST_EVENTS:],
    }
    return "\n\n".join(["\n  ".join([title, *lines]) for title, lines in parts.items() if lines])


def headline(summary: dict[str, Any]) -> str:
    """Return the state, the size and the speed of a run in one line."""
    counts = [(summary["ranks"], "rank"), (summary["hosts"], "machine"), (summary["steps"], "step")]
    ranks, hosts, steps = [f"{count:,} {noun}{'s' * (count != 1)}" for count, noun in counts]
    return f"{summary['state']}, {ranks} on {hosts}, {steps}"


def facts(summary: dict[str, Any]) -> list[str]:
    """Return the strategy and sizes of a run, its times, rates and largest numbers, a line each."""
    names = [name for name in ("script", "strategy", "precision", "accelerator") if name in summary]
    made_of = [f"{name} {summary[name]}" for name in names]
    made_of += [f"{summary.get('parameters', 0):,} parameters"]
    made_of += [f"{name} {number}" for name, number in summary.get("versions", {}).items()]
    times = f"{summary['begin']} to {summary['end']}: {summary['seconds']:,.1f} s"
    times += f", started {summary['attempts']} times" * (summary["attempts"] > 1)
    rates = [f"{summary['steps_per_second']:,.4g} steps/s with all pauses"]
    rates += [f"{1000 * summary['seconds_per_step']['step']:,.4g} ms per step"]
    if "flops_per_second" in summary:
        rates += [f"{summary['flops_per_second'] / 1e12:,.3g} TFLOP/s per rank"]
    if "mfu" in summary:
        rates += [f"MFU {100 * summary['mfu']:.1f} %"]
    for name, curve in summary["curves"].items():  # as ThroughputMonitor logs them
        rates += [f"{name} {value:,.4g}" for value in curve["mean"][-1:] if name.endswith(("per_sec", "mfu"))]
        if "rank" in curve and curve["most"]:
            most, rank, first = max(zip(curve["most"], curve["rank"], curve["first_step"], strict=True))
            rates.append(f"{name}: at most {most:,.4g}, on rank {rank}, about step {first:,}")
    return [", ".join(made_of), times, "; ".join(rates)]


def event_text(row: dict[str, Any]) -> str:
    """Return a line for the events of one kind in one bin of steps."""
    clock, several = time.strftime("%H:%M:%S", time.localtime(row["time"])), f", {row['count']} times"
    seconds = f", {row['seconds']:.3g} s" * bool(row["seconds"])
    place = f"step {row['step']:,}  {row['kind']}, rank {row['rank']}{several * (row['count'] > 1)}{seconds}"
    return f"{clock}  {place}: {row['text']}"


def sparkline(values: list[float]) -> str:
    """Return bars of the values, then the last one and both extremes."""
    size = -(-len(values) // _WIDTH)
    means = [
        sum(group) / len(group) for group in (values[at : at + size] for at in range(0, len(values), size))
    ]
    scale = (len(_BARS) - 1) / ((max(means) - min(means)) or 1)
    bars = "".join([_BARS[round((value - min(means)) * scale)] for value in means])
    return f"{bars}  {values[-1]:.4g} (from {min(values):.4g} to {max(values):.4g})"


def follow_run(run: RunAggregate, interval: float) -> Iterator[str]:
    """Yield a line now and after each interval, until all ranks ended; the last lines are the findings.

    A run without records for half an hour, or two minutes after a failure, has ended, too.
    """
    before: dict[int, Tensor] = {}
    while True:
        summary = summarize(run)
        yield _minute(run, summary, before)
        before = {rank: entry.sums.sum(0) for rank, entry in run.ranks.items()}
        has_failed = any(["failure" in row["kind"] for row in summary["events"]])
        if not run.is_alive(ALIVE_S if has_failed else _PAUSE_S):
            break
        time.sleep(interval)
        run.update()
    yield "\n".join([headline(summary), *summary["failures"], *straggler_texts(summary["stragglers"])])


def _minute(run: RunAggregate, summary: dict[str, Any], before: dict[int, Tensor]) -> str:
    """Return the line of the steps since `before`."""
    ranks, zero = sorted(run.written()), torch.zeros(1)
    since = torch.stack([run.ranks[rank].sums.sum(0) - before.get(rank, zero) for rank in ranks])
    means, count = per_step(since), int(since[:, COUNT].max())
    words = [f"{time.strftime('%H:%M:%S')}  step {summary['last_step']:,} ({count:+,})"]
    if count:
        busy = busy_seconds(means).nan_to_num(0)
        slowest, percent = int(busy.argmax()), 100 * (float(busy.max() / busy.median()) - 1)
        words.append(f"{1000 * float(means[:, 0].nanmean()):,.4g} ms per step")
        words += [f"rank {ranks[slowest]}: +{percent:.0f} %"] * (percent > 15)
    else:
        newest = max([run.ranks[rank].end for rank in ranks])
        words.append(f"no record for {max(time.time() - newest, 0):,.0f} s")
    logged = [(name, curve["mean"][-1]) for name, curve in summary["curves"].items() if "least" in curve]
    return "  ".join(words + [f"{name} {value:.4g}" for name, value in logged[:4]])


def _table(summary: dict[str, Any]) -> list[str]:
    """Return the means over all ranks, and of each rank or the ranks with most seconds outside of waits."""
    names = [name for name in NAMES if name not in ("communication", "checkpoint")]
    slowest = sorted(summary["by_rank"], key=lambda row: -sum([row[name] for name in names]))[:_MOST_ROWS]
    rows = sorted(slowest, key=lambda row: row["rank"])
    mean = {"rank": "mean", "host": "", "peak_memory": 0} | summary["seconds_per_step"]
    table = [["rank", "host", "step", *NAMES, "peak MB"]]
    for row in [mean, *rows]:
        seconds = [f"{1000 * row[name]:,.4g}" for name in ("step", *NAMES)]
        memory = f"{row['peak_memory'] / 1e6:,.0f}" if row["peak_memory"] else ""
        table.append([str(row["rank"]), row["host"], *seconds, memory])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    more = len(summary["by_rank"]) - len(rows)
    return lines + [f"and {more} faster ranks: --json has all"] * bool(more)
