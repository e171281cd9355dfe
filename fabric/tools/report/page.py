"""A run as one HTML file that needs no network: plotly and the aggregated numbers. Called by `command.py`."""

from __future__ import annotations

import base64
import ctypes
import html
import time
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.extras import import_package
from fabric.tools.report.aggregate import BINS, COUNT, WHOLE
from fabric.tools.report.summary import NAMES, straggler_texts, summarize
from fabric.tools.report.text import event_text, facts, headline

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.tools.report.aggregate import RunAggregate

_MOST_CELLS = 1024 * BINS
"""Cells of the heatmap; with more ranks its columns are wider."""
_MOST_CURVES, _MOST_BARS = 24, 256
"""Largest number of curves; most ranks that are drawn as bars, since areas need half the time."""
_COLORS = ("#4c78a8", "#54a24b", "#72b7b2", "#e45756", "#b279a2", "#eeca3b", "#9d755d", "#9a9a9a")
_CURVES = {"most": _COLORS[3], "least": _COLORS[1], "mean": _COLORS[0]}
_CLEAR, _GRAY = "rgba(0,0,0,0)", "rgba(128,128,128,.25)"
_AXIS = {"gridcolor": _GRAY, "zerolinecolor": _GRAY, "automargin": True}
_CONFIG = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
_LAYOUT = {
    "height": 360,
    "margin": {"l": 55, "r": 10, "t": 50, "b": 45},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    "modebar": {"bgcolor": _CLEAR, "color": "#999", "activecolor": "#4c78a8"},
    "paper_bgcolor": _CLEAR,
    "plot_bgcolor": _CLEAR,
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --paper: #fff; --bad: #c4161c }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e9; --paper: #16171b; --bad: #ff7b72 } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 0 12px 24px; max-width: 1200px;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin: 1.2em 0 .3em; border-top: 1px solid #8884 }
#failures { color: var(--bad) } p, li { margin: .3em 0 } ul { padding-left: 1.2em }
@media (max-width: 600px) { .modebar { display: none } }
"""
_SCRIPT = """
const dark = matchMedia('(prefers-color-scheme: dark)'), touch = matchMedia('(pointer: coarse)').matches;
const paint = () => document.querySelectorAll('.js-plotly-plot').forEach(plot => Plotly.relayout(plot, {
  'font.color': dark.matches ? '#e4e4e9' : '#1b1b1f', ...(touch && {dragmode: false})}));
dark.addEventListener('change', paint); paint();
"""  # a finger on a plot scrolls the page


def as_page(run: RunAggregate) -> str:
    """Return the page of a run. Its bins become wider if it has more than 1,024 ranks.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    import_package("plotly", "fabric report", "report", least="6", instead="write --text or --json")
    offline, io = import_package("plotly.offline", "", "report"), import_package("plotly.io", "", "report")
    last = max([one.last_step for one in run.ranks.values()])
    while len(run.ranks) * (last // run.width + 1) > _MOST_CELLS:
        run.widen()
    summary = summarize(run)
    parts = [f"<h1>{html.escape(headline(summary))}</h1>"]
    parts += [f"<p>{html.escape(line)}</p>" for line in facts(summary)]
    lists = {"failures": summary["failures"], "stragglers": straggler_texts(summary["stragglers"])}
    for title, lines in {**lists, "notes": summary["notes"]}.items():
        rows = "".join([f"<li>{html.escape(line)}</li>" for line in lines])
        parts += [f'<h2>{title.capitalize()}</h2><ul id="{title}">{rows}</ul>'] * bool(lines)
    plots = {"Where the time goes": _bars(summary), "Step time by rank": _heatmap(run)}
    plots |= {"Step time, memory and logged values": _curves(summary), "Events": _timeline(summary)}
    for title, figure in plots.items():
        drawn = io.to_html(figure, config=_CONFIG, include_plotlyjs=False, full_html=False)
        parts.append(f"<h2>{title}</h2>{drawn}")
    title = f"<title>{html.escape(str(run.directory.absolute()))}</title>"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"{head}{title}<style>{_STYLE}</style><script>{offline.get_plotlyjs()}</script>"
    body = "\n".join([*parts, f"<script>{_SCRIPT}</script>"])
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>"


def _bars(summary: dict[str, Any]) -> dict[str, Any]:
    rows, data = summary["by_rank"], []
    ranks, hosts = [row["rank"] for row in rows], [html.escape(row["host"]) for row in rows]
    for name, color in zip(NAMES, _COLORS, strict=True):
        seconds = _packed(torch.tensor([1000 * row[name] for row in rows]))
        bar = {"name": name, "x": ranks, "y": seconds, "text": hosts, "textposition": "none"}
        bar |= {"type": "bar", "marker": {"color": color, "line": {"width": 0}}}
        if len(ranks) > _MOST_BARS:
            line = {"shape": "hvh", "width": 0}
            bar = {"name": name, "x": ranks, "y": seconds, "text": hosts, "type": "scatter", "mode": "lines"}
            bar |= {"stackgroup": "all", "fillcolor": color, "line": line}
        data.append(bar | {"hovertemplate": "rank %{x} on %{text}: %{y:.3g} ms"})
    return {"data": data, "layout": _layout("rank", "ms per step", barmode="stack", bargap=0.1)}


def _heatmap(run: RunAggregate) -> dict[str, Any]:
    ranks, entries = zip(*sorted(run.written().items()), strict=True)
    sums, peaks = torch.stack([one.sums for one in entries]), torch.stack([one.peaks for one in entries])
    used = [*sums[:, :, COUNT].sum(0).nonzero()[:, 0].tolist()] or [0]
    part = slice(used[0], used[-1] + 1)
    mean = 1000 * sums[:, part, WHOLE] / sums[:, part, COUNT]
    grids = {"mean": mean, "longest step": torch.where(mean.isnan(), torch.nan, 1000 * peaks[:, part, 0])}
    bins = {"x0": part.start * run.width + (run.width - 1) / 2, "dx": run.width, "y": ranks}
    bins |= {"type": "heatmap", "colorbar": {"title": {"text": "ms"}, "thickness": 12}}
    data, buttons = [], []
    for name, grid in grids.items():
        hover = f"rank %{{y}}, step %{{x:,.0f}}: %{{z:.3g}} ms, {name}<extra></extra>"
        data.append({**bins, "z": _packed(grid), "hovertemplate": hover, **_scale(grid)})
        data[-1]["visible"] = name == "mean"
        seen = [name == each for each in grids]
        buttons.append({"label": name, "method": "restyle", "args": [{"visible": seen}]})
    menu = {"buttons": buttons, "type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1.15}
    menu |= {"bgcolor": "#fff", "font": {"color": "#1b1b1f"}}
    title = f"step, {run.width} in a column" if run.width > 1 else "step"
    return {"data": data, "layout": _layout(title, "rank", height=460, updatemenus=[menu])}


def _scale(grid: Tensor) -> dict[str, Any]:
    """Return a color scale in which the largest 1 % are red, so that outliers hide no other difference."""
    values = grid[~grid.isnan()].sort().values.tolist() or [0.0]
    bound = (values[len(values) * 99 // 100] - values[0]) / ((values[-1] - values[0]) or 1)
    if not 0 < bound < 0.8:
        return {"colorscale": "Viridis"}
    return {"colorscale": [[0, "#440154"], [bound / 2, "#21918c"], [bound, "#fde725"], [1, "#d62728"]]}


def _curves(summary: dict[str, Any]) -> dict[str, Any]:
    shown, data = [*summary["curves"].items()][:_MOST_CURVES], []
    more = len(summary["curves"]) - len(shown)
    layout = _layout("step" + f"; {more} more values: fabric report --json" * (more > 0), "")
    layout |= {"height": 100 + 170 * len(shown), "showlegend": False, "hovermode": "x unified"}
    subplots = [[f"xy{index + 1 if index else ''}"] for index in range(len(shown))]
    layout["grid"] = {"rows": len(shown), "columns": 1, "ygap": 0.15, "subplots": subplots}
    for index, (name, curve) in enumerate(shown):
        axis = f"{index + 1}" if index else ""
        layout[f"yaxis{axis}"] = {"title": {"text": html.escape(name[:24])}, **_AXIS}
        mode = "lines" if len(curve["first_step"]) > 1 else "markers"
        line = {"type": "scatter", "mode": mode, "x": curve["first_step"], "yaxis": f"y{axis}"}
        for key in [key for key in _CURVES if key in curve]:
            data.append({**line, "name": key, "y": curve[key], "line": {"color": _CURVES[key], "width": 1.3}})
        if "rank" in curve:
            data[-2] |= {"text": curve["rank"], "hovertemplate": "%{y:.4g} on rank %{text}"}
        else:
            data[-2] |= {"fill": "tonexty", "fillcolor": _GRAY}
    return {"data": data, "layout": layout}


def _timeline(summary: dict[str, Any]) -> dict[str, Any]:
    rows = summary["events"]
    kinds = [row["kind"] for row in rows]
    times = [time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(row["time"])) for row in rows]
    texts = [html.escape(event_text(row)[:160]) for row in rows]
    colors = [_COLORS[3] if "failure" in kind or "not ok" in kind else _COLORS[0] for kind in kinds]
    dots: dict[str, Any] = {"type": "scatter", "mode": "markers", "x": times, "y": kinds, "text": texts}
    dots |= {"marker": {"size": 9, "color": colors}, "hovertemplate": "%{text}<extra></extra>"}
    layout = _layout("", "", height=120 + 28 * len({*kinds}), hovermode="closest")
    layout["yaxis"] |= {"type": "category"}
    return {"data": [dots], "layout": layout}


def _layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    axes = {"xaxis": {"title": {"text": x}, **_AXIS}, "yaxis": {"title": {"text": y}, **_AXIS}}
    return {**_LAYOUT, **axes, **more}


def _packed(values: Tensor) -> dict[str, Any]:
    """Return numbers as base64 for plotly.js: 4 bytes each."""
    values = values.float().contiguous()
    data = base64.b64encode(ctypes.string_at(values.data_ptr(), values.nbytes)).decode()
    return {"dtype": "f4", "bdata": data, "shape": ", ".join(map(str, values.shape))}
