"""A plan as text and as JSON: the table, and the recommendation with its reason. Called by `plan.py`."""

from __future__ import annotations

from typing import Any

from fabric.tools.plan.memory import KINDS
from fabric.tools.plan.units import show_bytes

_NAMES = {"optimizer": "the optimizer's states"}


def as_text(plan: Any) -> str:
    """Return the table of all rows and the recommendation."""
    request = plan.request
    ranks = request.devices * request.num_nodes
    head = ["strategy", "precision", "peak", *KINDS, "sent a step"]
    head += ["largest batch_size"] * (request.memory is not None) + ["at least"] * (_bounded(plan))
    lines, errors = [head], []
    for row in plan.rows:
        if row.found.error:
            errors.append(f"{row.strategy}, {row.precision}: {row.found.error}")
            continue
        mark = "" if request.memory is None or row.fits else " (too much)"
        cells = [row.strategy, row.precision, show_bytes(row.found.peak.bytes) + mark]
        cells += [show_bytes(row.found.peak.kinds[kind]) for kind in KINDS]
        cells += [show_bytes(row.sent)]
        if request.memory is not None:
            cells.append("?" if row.largest is None else str(row.largest))
        if _bounded(plan):
            cells.append(f"{1000 * bound(plan, row):.3g} ms")
        lines.append(cells)
    widths = [max([len(line[i]) for line in lines]) for i in range(len(head))]
    table = [
        "  ".join([cell.ljust(width) for cell, width in zip(line, widths, strict=True)]) for line in lines
    ]
    size = next((row.found.batch_size for row in plan.rows if not row.found.error), None)
    per = f", batch_size {size} on each" if size else ""
    title = f"One of {ranks} rank{'s' * (ranks > 1)}{per}; the peak of two steps and its parts"
    return "\n".join([title, *[line.rstrip() for line in table], *errors, *recommendation(plan)])


def as_dict(plan: Any) -> dict[str, Any]:
    """Return the plan as values of JSON."""
    best = plan.best
    rows = [
        {
            "strategy": row.strategy,
            "precision": row.precision,
            "error": row.found.error or None,
            "peak": row.found.peak.bytes,
            **row.found.peak.kinds,
            "sent": row.found.traffic,
            "batch_size": row.found.batch_size,
            "largest_batch_size": row.largest,
            "fits": row.fits if plan.request.memory is not None else None,
            "seconds_at_least": bound(plan, row) if _bounded(plan) else None,
        }
        for row in plan.rows
    ]
    chosen = None if best is None else {"strategy": best.strategy, "precision": best.precision}
    return {
        "ranks": plan.request.devices * plan.request.num_nodes,
        "memory": plan.request.memory,
        "rows": rows,
        "best": chosen,
        "recommendation": recommendation(plan),
    }


def bound(plan: Any, row: Any) -> float:
    """Return the lower bound of the seconds of a step: the longer of computation and communication."""
    flops, bandwidth = plan.request.flops, plan.request.bandwidth
    computing = row.found.flops / flops if flops else 0.0
    return max(computing, row.sent / bandwidth if bandwidth else 0.0)


def recommendation(plan: Any) -> list[str]:
    """Return the line of code to write and the reason; empty without `memory`."""
    memory = plan.request.memory
    if memory is None:
        return ["Write --memory 80GB to see what fits, and the largest batch_size."]
    best, lines = plan.best, []
    rows = [row for row in plan.rows if not row.found.error]
    if best is not None:
        devices = f"devices={plan.request.devices}"
        if plan.request.num_nodes > 1:
            devices += f", num_nodes={plan.request.num_nodes}"
        code = f'Fabric({devices}, strategy="{best.strategy}", precision="{best.precision}")'
        used = f"{show_bytes(best.found.peak.bytes)} of {show_bytes(memory)}"
        faster = [row for row in rows[: rows.index(best)] if row.precision == best.precision]
        lines.append(f"Write {code}: {used}{_reason(faster)}.")
    else:
        fitting = [row for row in rows if row.largest]
        if fitting:
            most = max(fitting, key=lambda row: row.largest or 0)
            lines.append(
                f"Nothing fits into {show_bytes(memory)}. Write batch_size={most.largest} with "
                f'strategy="{most.strategy}", precision="{most.precision}", and accumulate gradients.'
            )
        else:
            lines.append(
                f"Nothing fits into {show_bytes(memory)}, with any batch_size. Use more devices (--devices "
                f"{2 * plan.request.devices}), a smaller model, or activation checkpointing."
            )
    if rows:
        lines += _checkpointing(best or rows[-1])
    if _bounded(plan):
        lines.append("Times are lower bounds: the longer of computing and sending, nothing else counted.")
    return lines


def _reason(faster: list[Any]) -> str:
    if not faster:
        return ""
    row = faster[0]
    kind = max(KINDS, key=row.found.peak.kinds.__getitem__)
    size = show_bytes(row.found.peak.kinds[kind])
    peak = show_bytes(row.found.peak.bytes)
    return f"; {row.strategy} needs {peak}, of which {size} are {_NAMES.get(kind, kind)}"


def _checkpointing(row: Any) -> list[str]:
    """Return a line on the memory that activation checkpointing of the repeated blocks saves."""
    lines = []
    for name, size in row.found.peak.blocks.items():
        count = row.found.blocks[name]
        saved = size * (count - 1) // count
        if saved > row.found.peak.bytes // 50:
            lines.append(
                f"With {row.strategy}, activation checkpointing of {count} blocks of `{name}` would save up "
                f"to {show_bytes(saved)}."
            )
    return lines


def _bounded(plan: Any) -> bool:
    return plan.request.flops is not None or plan.request.bandwidth is not None
