"""A run as lines for a terminal: all of it, or a line a minute while it runs. Called by `command.py`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from fabric.tools.report.aggregate import ALIVE_S, COUNT
from fabric.tools.report.summary import NAMES, WAITS, per_step, slowest_rank, straggler_texts, summarize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fabric.tools.report.aggregate import RunAggregate

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_MOST_ROWS = 12
_MOST_EVENTS = 40
_PAUSE_S = 1800.0


def as_text(summary: dict[str, Any]) -> str:
    """Return the report as tables and lines of bars."""
    lines = [f"fabric report {summary['directory']}: {headline(summary)}", *facts(summary)]
    lines += _part("failures", summary["failures"])
    lines += _part("stragglers", straggler_texts(summary["stragglers"]))
    lines += _part("notes", summary["notes"])
    lines += _part("where the time goes, milliseconds per step", _table(summary))
    steps = summary["by_step"]
    span = (
        f"steps {max(steps['first_step'][0], 1):,}-{summary['last_step']:,}"
        if steps["first_step"]
        else "no steps"
    )
    curves = [("step, ms", [1000 * value for value in steps["seconds"]])]
    curves += [("longest step, ms", [1000 * value for value in steps["longest"]])]
    curves += [(name, value["mean"]) for name, value in summary["values"].items()]
    curves += [("peak memory, MB", [value / 1e6 for value in steps["memory"]])]
    width = max([len(name) for name, _ in curves])
    lines += _part(span, [f"{name:{width}}  {sparkline(values)}" for name, values in curves if values])
    rows = [row for row in summary["events"] if row["kind"] not in ("start", "end")]
    lines += _part("events", [event_text(row) for row in rows[-_MOST_EVENTS:]])
    return "\n".join(lines + [f"  {len(rows) - _MOST_EVENTS} earlier: --json"] * (len(rows) > _MOST_EVENTS))


def headline(summary: dict[str, Any]) -> str:
    """Return the state, the size and the speed of a run in one line."""
    sizes = f"{_counted(summary['ranks'], 'rank')} on {_counted(summary['hosts'], 'machine')}"
    return f"{summary['state']}, {sizes}, {_counted(summary['steps'], 'step')}"


def facts(summary: dict[str, Any]) -> list[str]:
    """Return what a run is made of, its times, its rates and its largest numbers, a line each."""
    names = [name for name in ("script", "strategy", "precision", "accelerator") if summary.get(name)]
    made_of = [f"{name} {summary[name]}" for name in names]
    made_of += [f"{summary['parameters']:,} parameters"] * bool(summary.get("parameters"))
    made_of += [f"{name} {number}" for name, number in (summary.get("versions") or {}).items()]
    rates = [f"{summary['steps_per_second']:,.4g} steps/s with all pauses"]
    rates += [f"{_ms(summary['seconds_per_step']['step'])} per step"]
    rates += [f"{name} {value:,.4g}" for name, value in summary["logged_rates"].items()]
    longest = summary["longest_step"]
    largest = f"longest step {_ms(longest['seconds'])}: rank {longest['rank']}, {_span(*longest['steps'])}"
    attempts = f"{summary['begin']} to {summary['end']}, {_duration(summary['seconds'])}"
    attempts += f", started {summary['attempts']} times" if summary["attempts"] > 1 else ""
    memory = f"peak memory {summary['peak_memory'] / 1e9:,.3g} GB"
    return [", ".join(made_of)] * bool(made_of) + [attempts, ", ".join(rates), f"{largest}; {memory}"]


def event_text(row: dict[str, Any]) -> str:
    """Return a line for the events of one kind in one bin of steps."""
    seconds = f", {row['seconds']:.3g} s" if row["seconds"] else ""
    several = f", {row['count']} times" if row["count"] > 1 else ""
    clock = time.strftime("%H:%M:%S", time.localtime(row["time"]))
    return (
        f"{clock}  step {row['step']:,}  {row['kind']}, rank {row['rank']}{several}{seconds}: {row['text']}"
    )


def sparkline(values: list[float]) -> str:
    """Return bars of the values, then the first, the last and both extremes."""
    size = -(-len(values) // _WIDTH)
    groups = [values[begin : begin + size] for begin in range(0, len(values), size)]
    means = [sum(group) / len(group) for group in groups]
    least, most = min(means), max(means)
    scale = (len(_BARS) - 1) / (most - least) if most > least else 0.0
    bars = "".join([_BARS[round((value - least) * scale)] for value in means])
    return (
        f"{bars:{min(_WIDTH, len(values))}}  {values[-1]:.4g} (from {min(values):.4g} to {max(values):.4g})"
    )


def follow(run: RunAggregate, interval: float) -> Iterator[str]:
    """Yield a line now and after each interval, until all ranks ended; the last lines are the findings.

    A run without records for half an hour, or two minutes after a failure, has ended, too.
    """
    before: dict[int, Tensor] = {}
    while True:
        summary = summarize(run)
        yield _minute(run, summary, before)
        before = {rank: entry.sums.sum(0) for rank, entry in run.ranks.items()}
        if not run.is_alive(ALIVE_S if "failure" in {row["kind"] for row in summary["events"]} else _PAUSE_S):
            break
        time.sleep(interval)
        run.update()
    yield "\n".join([headline(summary), *summary["failures"], *straggler_texts(summary["stragglers"])])


def _minute(run: RunAggregate, summary: dict[str, Any], before: dict[int, Tensor]) -> str:
    """Return the line of the steps since `before`."""
    zero = torch.zeros(1)
    since = torch.stack([run.ranks[rank].sums.sum(0) - before.get(rank, zero) for rank in sorted(run.ranks)])
    means, count = per_step(since), int(since[:, COUNT].max())
    words = [f"{time.strftime('%H:%M:%S')}  step {summary['last_step']:,} ({count:+,})"]
    if count:
        words.append(f"{_ms(float(means[:, 0].nanmean()))} per step")
        words += slowest_rank(means, sorted(run.ranks))
    else:
        newest = max([entry.end for entry in run.ranks.values()])
        words.append(f"no record for {time.time() - newest:,.0f} s")
    words += [f"{name} {value['last'][-1]:.4g}" for name, value in [*summary["values"].items()][:4]]
    return "  ".join(words)


def _table(summary: dict[str, Any]) -> list[str]:
    """Return the row of each rank, or of the mean and of the slowest ones."""
    rows, columns = summary["by_rank"], ["step", *NAMES]
    slowest = sorted(rows, key=lambda row: -sum([row[name] for name in NAMES if name not in WAITS]))[
        :_MOST_ROWS
    ]
    shown = rows if len(rows) <= _MOST_ROWS else slowest
    table = [["rank", "host", *columns, "peak MB"]]
    table += [["mean", "", *_cells(summary["seconds_per_step"], columns), ""]]
    for row in shown:
        seconds = _cells({**row, "step": row["seconds_per_step"]}, columns)
        table.append([str(row["rank"]), row["host"], *seconds, f"{row['peak_memory'] / 1e6:,.0f}"])
    widths = [max([len(line[index]) for line in table]) for index in range(len(table[0]))]
    lines = [
        "  ".join([cell.ljust(width) for cell, width in zip(line, widths, strict=True)]) for line in table
    ]
    more = len(rows) - len(shown)
    return [line.rstrip() for line in lines] + [f"and {more} faster ranks: --json has all"] * bool(more)


def _cells(seconds: dict[str, float], names: list[str]) -> list[str]:
    return [f"{1000 * seconds[name]:,.4g}" for name in names]


def _part(title: str, lines: list[str]) -> list[str]:
    return ["", title, *[f"  {line}" for line in lines]] if lines else []


def _ms(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1000 * seconds:,.3g} ms"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return (
        f"{hours} h {rest // 60} min"
        if hours
        else f"{rest // 60} min {rest % 60} s"
        if rest >= 60
        else f"{seconds:.1f} s"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _span(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"within steps {first:,}-{last:,}"
