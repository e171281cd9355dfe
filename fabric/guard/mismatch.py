"""Error tables for ranks that make different calls: a row for equal ranks, and advice.

Pure, and loaded only where something is wrong: by `call_checker.py`, `deadlocks.py` and the watchdog.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from fabric.collectives.frames import ALONE, CONSTANT, CONTENTS, IN_THREAD, REFUSED
from fabric.guard.messages import RankReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MODEL = re.compile(r"model \d+ \(")
"""How the name of a model that was set up begins, in a verb or in the description of its data."""
_STEP = re.compile(r"\bstep of\b|\.step\b")
TEXT_BYTES = 1 << 20
"""Longest text in which a rank of those that disagree says what it was about to do."""


def to_text(said: RankReport) -> bytes:
    """A row on its way to the other ranks."""
    return "\n".join((said.verb, said.where, said.what)).encode(errors="replace")[:TEXT_BYTES]


def from_text(rank: int, text: bytes) -> RankReport:
    """The row that `to_text` sent."""
    verb, where, what = [*text.decode(errors="replace").split("\n", 2), "", ""][:3]
    return RankReport(rank, verb, what, where)


def mismatch_text(rows: Sequence[RankReport]) -> str:
    """The error for ranks that make different calls: what went wrong, the table, what to look for."""
    each, refusing = rows, [row for row in rows if row.what.startswith(REFUSED)]
    rows = [*{row[1:]: row for row in rows}.values()]
    if refusing:
        head = f"Rank {as_spans([row.rank for row in refusing])} refused the arguments of {refusing[0].verb}"
        remedy = "Call it on all ranks with arguments that every rank accepts."
    elif len({row.verb for row in rows}) == 1:
        head = f"Ranks called {rows[0].verb} with different data"
        hint = " (all_gather has uneven='list' or 'cat')" * rows[0].verb.startswith("all_gather")
        remedy = f"Give every rank the same structure, shapes and dtypes{hint}."
        if " changes in place" in rows[0].what:
            remedy = "Call the model equally often on all ranks before its weights change."
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
    named = [MODEL.findall(f"{row.verb} {row.what}") for row in rows]
    if not refusing and all(named) and any([names != named[0] for names in named]):
        remedy = (
            "Ranks must use models and optimizers in one order. Loop over a list or a dictionary: a set has "
            "an order of its own in each process."
        )
    return f"{head}.\n{table(each)}\n{remedy}"


def table(rows: Sequence[RankReport]) -> str:
    """A line for ranks with equal rows: ranks, verb, data, file:line; those of few ranks first.

    Long data is shown from where it differs.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        groups.setdefault(row[1:], []).append(row.rank)
    odd_first = sorted(groups.items(), key=lambda group: len(group[1]))
    cells = [("rank", "call", "data", "at")]
    whats = _trimmed([what for (_, what, _), _ in odd_first])
    for ((verb, _, where), ranks), what in zip(odd_first, whats, strict=True):
        cells.append((as_spans(ranks), verb, what, where))
    return aligned(cells)


def as_spans(ranks: Iterable[int]) -> str:
    """Return the ranks in order as people write them: `0-699, 701-1023`."""
    runs = groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])
    spans = [[str(rank) for _, rank in run] for _, run in runs]
    return ", ".join([f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(span) for span in spans])


def aligned(cells: Sequence[tuple[str, ...]]) -> str:
    """A line per tuple, all columns but the last as wide as their longest cell."""
    widths = [max([len(line[column]) for line in cells]) for column in range(len(cells[0]) - 1)]
    lines = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        lines.append("  ".join(["", *padded, line[-1]]).rstrip())
    return "\n".join(lines)


def _trimmed(texts: list[str], limit: int = 100) -> list[str]:
    """The texts from a little before where they differ; refusals as they are, for people to read."""
    start = 0
    if max([len(text) for text in texts]) > limit and not any([text.startswith(REFUSED) for text in texts]):
        letters = enumerate(zip(*texts, strict=False))
        ends = min([len(text) for text in texts])
        start = max(0, next((i for i, each in letters if len(set(each)) > 1), ends) - limit // 3)
    shown = [("..." if start else "") + text[start:] for text in texts]
    return [
        text if len(text) <= limit or text.startswith(REFUSED) else text[: limit - 3] + "..."
        for text in shown
    ]
