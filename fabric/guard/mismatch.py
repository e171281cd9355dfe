"""Error tables for ranks that make different calls: a row per set of equal ranks, and advice.

Pure functions, imported only after an error: by `call_checker.py`, `deadlocks.py` and the watchdog.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fabric.collectives.frames import ALONE, CONSTANT, CONTENTS, IN_THREAD, NO_GRADIENT, REFUSED
from fabric.core.messages import name_ranks, ranks_text
from fabric.guard.messages import RankReport

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = re.compile(r"model \d+ \(")
"""Prefix of the name of a model after setup, in a verb or in the description of its data."""
_STEP = re.compile(r"\bstep of\b|\.step\b|backward")
"""Verbs of a step that a rank may have skipped, for example for a loss that is not finite."""
TEXT_BYTES = 1 << 20
"""Most bytes of an encoded report."""


def encode_report(report: RankReport) -> bytes:
    """Return a report as bytes, for the other ranks."""
    return "\n".join((report.verb, report.where, report.what)).encode(errors="replace")[:TEXT_BYTES]


def decode_report(rank: int, text: bytes) -> RankReport:
    """Return the report that `encode_report` encoded, with this rank."""
    verb, where, what = [*text.decode(errors="replace").split("\n", 2), "", ""][:3]
    return RankReport(rank, verb, what, where)


def mismatch_text(rows: Sequence[RankReport]) -> str:
    """Return the error for ranks that make different calls: the cause, the table, advice."""
    all_rows, refusing = rows, [row for row in rows if row.what.startswith(REFUSED)]
    rows = [*{row[1:]: row for row in rows}.values()]
    if refusing:
        ranks = name_ranks([row.rank for row in refusing]).capitalize()
        head = f"{ranks} refused the arguments of {refusing[0].verb}"
        remedy = "Call it on all ranks with arguments that every rank accepts."
    elif len({row.verb for row in rows}) == 1:
        head = f"Ranks called {rows[0].verb} with different data"
        hint = " (all_gather has uneven='list' or 'cat')" * rows[0].verb.startswith("all_gather")
        remedy = f"Give every rank the same structure, shapes and dtypes{hint}."
        if " changes in place" in rows[0].what:
            remedy = "Call the model equally often on all ranks before its weights change."
        if any([NO_GRADIENT in row.what for row in rows]):
            remedy = (
                "The layers of a sharded model are collectives: run the same layers on all ranks (add "
                "0 * layer(x).sum() to the loss for one without rows). Ranks may differ with "
                'strategy="ddp_find_unused_parameters_true".'
            )
        if any([CONSTANT in row.what for row in rows]):
            remedy += " Strings must be equal, too: fabric.all_gather_object gathers those that differ."
        if all([CONTENTS in row.what for row in rows]):
            remedy = (
                "Ranks that compute one model together need the same batch: give the loader to "
                "fabric.setup_dataloaders, use no sampler per rank, and seed all ranks alike."
            )
    else:
        head = "Ranks made different calls where all must make the same"
        remedy = (
            "All ranks must make the same calls in the same order: is one inside `if rank == 0:`, does a "
            "loop end earlier on one rank?"
        )
        if any([_STEP.search(row.verb) for row in rows]):
            remedy += " Skip a step on all ranks: `if fabric.any(skip): continue`."
        if any([IN_THREAD in row.verb for row in rows]):
            remedy += " Do two threads of a rank make calls? Make all of them in one."
        if any([row.verb.startswith(ALONE) for row in rows]):
            remedy += " For what one rank does alone write `with fabric.whole(model) as plain:` on all ranks."
    models = [MODEL.findall(f"{row.verb} {row.what}") for row in rows]
    kinds = {row.verb.partition(" of model ")[0].rpartition(".")[2] for row in rows}
    if not refusing and all(models) and len(kinds) == 1 and any([names != models[0] for names in models]):
        remedy = (
            "Ranks must use models and optimizers in one order. Loop over a list or a dictionary: a set has "
            "an order of its own in each process."
        )
    return f"{head}.\n{mismatch_table(all_rows)}\n{remedy}"


def mismatch_table(rows: Sequence[RankReport]) -> str:
    """Return a line per set of equal rows: ranks, verb, data, file:line; small sets first.

    Long data is cut to the part that differs.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        groups.setdefault(row[1:], []).append(row.rank)
    rare_first = sorted(groups.items(), key=lambda group: len(group[1]))
    cells = [("rank", "call", "data", "at")]
    whats = _cut_to_difference([what for (_, what, _), _ in rare_first])
    for ((verb, _, where), ranks), what in zip(rare_first, whats, strict=True):
        cells.append((ranks_text(ranks), verb, what, where))
    return align_columns(cells)


def align_columns(cells: Sequence[tuple[str, ...]]) -> str:
    """Return a line per tuple, with all columns but the last as wide as their longest cell up to 100."""
    sizes = [[len(line[column]) for line in cells] for column in range(len(cells[0]) - 1)]
    widths = [max([size for size in column if size <= 100], default=0) for column in sizes]
    lines = [[*map(str.ljust, line, widths), line[-1]] for line in cells]
    return "\n".join(["  ".join(["", *line]).rstrip() for line in lines])


def _cut_to_difference(texts: list[str], limit: int = 100) -> list[str]:
    """Return the texts cut to the part that differs, with context; refusals stay unchanged."""
    start = 0
    if max([len(text) for text in texts]) > limit and not any([text.startswith(REFUSED) for text in texts]):
        columns = enumerate(zip(*texts, strict=False))
        shortest = min([len(text) for text in texts])
        start = max(0, next((i for i, column in columns if len(set(column)) > 1), shortest) - limit // 3)
    shown = [("..." if start else "") + text[start:] for text in texts]
    return [
        text if len(text) <= limit or text.startswith(REFUSED) else text[: limit - 3] + "..."
        for text in shown
    ]
