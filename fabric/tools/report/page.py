"""A run as one HTML file that needs no network: plotly and the aggregated numbers. Called by `command.py`."""

from __future__ import annotations

import base64
import ctypes
import html
import time
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.extras import import_package
from fabric.tools.report.aggregate import COUNT, WHOLE
from fabric.tools.report.summary import NAMES, straggler_texts
from fabric.tools.report.text import facts, headline

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.tools.report.aggregate import RunAggregate

_MOST_ROWS = 1024
"""Rows of plots by rank; a row of a larger run is several ranks."""
_MOST_VALUES = 24
_COLORS = ("#4c78a8", "#54a24b", "#72b7b2", "#e45756", "#b279a2", "#eeca3b", "#9d755d", "#9a9a9a")
_CONFIG = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
_GRID = {"gridcolor": "rgba(128,128,128,.25)", "zerolinecolor": "rgba(128,128,128,.25)"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --paper: #fff; --line: #8884 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e9; --paper: #16171b } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 0 12px 24px; max-width: 1200px;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin: 1.6em 0 .3em; border-top: 1px solid var(--line);
  padding-top: .8em } .bad { color: #d62728 } p, li { margin: .3em 0 } ul { padding-left: 1.2em }
@media (max-width: 600px) { .modebar { display: none } }
"""
_SCRIPT = """
const dark = matchMedia('(prefers-color-scheme: dark)'), touch = matchMedia('(pointer: coarse)').matches;
const paint = () => document.querySelectorAll('.js-plotly-plot').forEach(plot => Plotly.relayout(plot, {
  'font.color': dark.matches ? '#e4e4e9' : '#1b1b1f', ...(touch && {dragmode: false})}));
dark.addEventListener('change', paint); paint();
"""  # a finger on a plot scrolls the page


def as_page(run: RunAggregate, summary: dict[str, Any]) -> str:
    """Return the page of a run.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    import_package("plotly", "fabric report", "report", least="6", instead="write --text or --json")
    offline, io = import_package("plotly.offline", "", "report"), import_package("plotly.io", "", "report")
    plots = {
        "Where the time goes": _bars(summary),
        "Step time by rank": _heatmap(run, summary),
        "Step time": _step_time(summary),
        "Logged values": _values(summary),
        "Memory": _memory(summary),
        "Events": _timeline(summary),
    }
    parts = [
        f"<h1>{_escape(headline(summary))}</h1>",
        *[f"<p>{_escape(line)}</p>" for line in facts(summary)],
    ]
    parts += _list("Failures", summary["failures"], "bad")
    parts += _list("Stragglers", straggler_texts(summary["stragglers"]), "")
    parts += _list("Notes", summary["notes"], "")
    for title, figure in plots.items():
        if figure is not None:
            drawn = io.to_html(figure, config=_CONFIG, include_plotlyjs=False, full_html=False)
            parts.append(f"<h2>{title}</h2>{drawn}")
    title = f"<title>{_escape(str(run.directory.absolute()))}</title>"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"{head}{title}<style>{_STYLE}</style><script>{offline.get_plotlyjs()}</script>"
    body = "\n".join([*parts, f"<script>{_SCRIPT}</script>"])
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>"


def _bars(summary: dict[str, Any]) -> dict[str, Any]:
    rows = summary["by_rank"]
    size = -(-len(rows) // _MOST_ROWS)
    seconds = torch.tensor([[row[name] for name in NAMES] for row in rows])
    means = torch.stack([part.nanmean(0) for part in seconds.split(size)], dim=1) * 1000
    first = [row["rank"] for row in rows[::size]]
    hosts = [row["host"] for row in rows[::size]]
    data = [
        {"type": "bar", "name": name, "x": first, "y": _packed(means[index]), "marker": {"color": color}}
        | {"hovertemplate": "rank %{x} on %{text}: %{y:.3g} ms", "text": hosts, "textposition": "none"}
        for index, (name, color) in enumerate(zip(NAMES, _COLORS, strict=True))
    ]
    return {"data": data, "layout": _layout(_by(size), "ms per step", barmode="stack", bargap=0.1)}


def _heatmap(run: RunAggregate, summary: dict[str, Any]) -> dict[str, Any]:
    ranks = [row["rank"] for row in summary["by_rank"]]
    size = -(-len(ranks) // _MOST_ROWS)
    used = [step // run.width for step in summary["by_step"]["first_step"]] or [0]
    part = slice(used[0], used[-1] + 1)
    sums = torch.stack([run.ranks[rank].sums[part, : WHOLE + 1] for rank in ranks])
    peaks = torch.stack([run.ranks[rank].peaks[part, 0] for rank in ranks])
    total = torch.stack([rows.sum(0) for rows in sums.split(size)])
    longest = torch.stack([rows.amax(0) for rows in peaks.split(size)])
    mean = 1000 * total[:, :, WHOLE] / total[:, :, COUNT]
    grids = {"mean": mean, "longest step": torch.where(mean.isnan(), torch.nan, 1000 * longest)}
    data, several = [], run.width > 1 or size > 1
    for name, grid in grids.items():
        x = {"x0": used[0] * run.width + (run.width - 1) / 2, "dx": run.width}
        hover = f"rank %{{y}}, step %{{x:,.0f}}: {name if several else 'took'} %{{z:.3g}} ms<extra></extra>"
        data.append(
            {"type": "heatmap", "z": _packed(grid), **x, "y": ranks[::size], "visible": name == "mean"}
            | {"hovertemplate": hover, "colorbar": {"title": {"text": "ms"}, "thickness": 12}, **_scale(grid)}
        )
    buttons = [
        {"label": name, "method": "restyle", "args": [{"visible": [name == each for each in grids]}]}
        for name in grids
    ]
    menu = {"buttons": buttons, "type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1.15}
    menu |= {"bgcolor": "#fff", "font": {"color": "#1b1b1f"}}
    title = "step" if run.width == 1 else f"step, {run.width} in a column"
    extra = {"updatemenus": [menu]} if several else {}
    return {"data": data[: 1 + several], "layout": _layout(title, _by(size), height=460, **extra)}


def _scale(grid: Tensor) -> dict[str, Any]:
    """Return a scale of colors for all but the largest 1 %, which are red: neither is lost in the other."""
    values = grid[~grid.isnan()]
    if not len(values) or values.max() <= values.min():
        return {}
    bound = float((values.quantile(0.99) - values.min()) / (values.max() - values.min()))
    if bound > 0.8:
        return {"colorscale": "Viridis"}
    bound = max(bound, 1e-3)
    return {"colorscale": [[0, "#440154"], [bound / 2, "#21918c"], [bound, "#fde725"], [1, "#d62728"]]}


def _step_time(summary: dict[str, Any]) -> dict[str, Any]:
    steps = summary["by_step"]
    data = [
        _line("longest", steps["first_step"], [1000 * value for value in steps["longest"]], 3)
        | {"text": steps["longest_rank"], "hovertemplate": "%{y:.3g} ms on rank %{text}"},
        _line("mean of all ranks", steps["first_step"], [1000 * value for value in steps["seconds"]], 0),
    ]
    return {"data": data, "layout": _layout("step", "ms", hovermode="x unified")}


def _values(summary: dict[str, Any]) -> dict[str, Any] | None:
    names = sorted(summary["values"], key=lambda name: "loss" not in name)[:_MOST_VALUES]
    if not names:
        return None
    left = len(summary["values"]) - len(names)
    data: list[dict[str, Any]] = []
    layout = _layout("step" + f"; {left} more values: fabric report --json" * bool(left), names[0])
    layout |= {"height": 120 + 180 * len(names), "showlegend": False, "hovermode": "x unified"}
    subplots = [[f"xy{index or ''}"] for index in [0, *range(2, len(names) + 1)]]
    layout["grid"] = {"rows": len(names), "columns": 1, "ygap": 0.15, "subplots": subplots}
    for index, name in enumerate(names):
        bins, axis = summary["values"][name], f"y{index + 1}" if index else "y"
        layout[axis.replace("y", "yaxis")] = {"title": {"text": _escape(name)}, **_GRID}
        first = bins["first_step"]
        band = {"fill": "tonexty", "fillcolor": "rgba(128,128,128,.2)"}
        data += [
            {"yaxis": axis, **_line("most", first, bins["most"], 7)},
            {"yaxis": axis, **_line("least", first, bins["least"], 7), **band},
            {"yaxis": axis, **_line("mean", first, bins["mean"], 0)},
        ]
    return {"data": data, "layout": layout}


def _memory(summary: dict[str, Any]) -> dict[str, Any]:
    steps = summary["by_step"]
    data = [
        _line("most", steps["first_step"], [value / 1e6 for value in steps["memory"]], 3)
        | {"text": steps["memory_rank"], "hovertemplate": "%{y:,.4g} MB on rank %{text}"},
        _line("mean of all ranks", steps["first_step"], [value / 1e6 for value in steps["mean_memory"]], 0),
    ]
    return {"data": data, "layout": _layout("step", "peak MB", hovermode="x unified", height=280)}


def _timeline(summary: dict[str, Any]) -> dict[str, Any]:
    rows = summary["events"]
    bad = [("failure" in row["kind"] or "not ok" in row["kind"]) for row in rows]
    texts = [
        _escape(f"step {row['step']:,}, rank {row['rank']}" + f", {row['count']} times" * (row["count"] > 1))
        + f", {row['seconds']:.3g} s" * bool(row["seconds"])
        + "<br>"
        + _escape(row["text"][:160])
        for row in rows
    ]
    data: dict[str, Any] = {"type": "scatter", "mode": "markers", "x": [_date(row["time"]) for row in rows]}
    data |= {
        "y": [row["kind"] for row in rows],
        "text": texts,
        "hovertemplate": "%{x}<br>%{text}<extra></extra>",
    }
    data["marker"] = {"size": 9, "color": ["#d62728" if one else "#4c78a8" for one in bad]}
    layout: dict[str, Any] = _layout(
        "", "", height=120 + 28 * len({row["kind"] for row in rows}), hovermode="closest"
    )
    layout["yaxis"] |= {"type": "category", "automargin": True}
    return {"data": [data], "layout": layout}


def _line(name: str, x: list[int], y: list[float], color: int) -> dict[str, Any]:
    """Return a line; a single point is a marker."""
    mode = "lines" if len(x) > 1 else "markers"
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": _COLORS[color], "width": 1.5},
    }


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    axes = {"xaxis": {"title": {"text": x}, **_GRID}, "yaxis": {"title": {"text": y}, **_GRID}}
    colors: dict[str, Any] = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
    colors["modebar"] = {"bgcolor": "rgba(0,0,0,0)", "color": "#999", "activecolor": "#4c78a8"}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
    return {
        "height": 360,
        "margin": {"l": 55, "r": 10, "t": 50, "b": 45},
        "legend": legend,
        **axes,
        **colors,
        **more,
    }


def _packed(values: Tensor) -> dict[str, Any]:
    """Return numbers as plotly.js reads them from base64: 4 bytes each."""
    values = values.float().contiguous()
    data = base64.b64encode(ctypes.string_at(values.data_ptr(), values.nbytes)).decode()
    return {"dtype": "f4", "bdata": data, "shape": ", ".join(map(str, values.shape))}


def _by(size: int) -> str:
    return "rank" if size == 1 else f"rank, {size} in a row"


def _list(title: str, lines: list[str], kind: str) -> list[str]:
    rows = "".join([f"<li>{_escape(line)}</li>" for line in lines])
    return [f'<h2>{title}</h2><ul class="{kind}">{rows}</ul>'] if lines else []


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds)) + f"{seconds % 1:.3f}"[1:]


def _escape(text: str) -> str:
    return html.escape(text)
