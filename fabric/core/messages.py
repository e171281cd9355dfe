"""One line to the user on stderr, and texts of values in messages. Imports no torch."""

from __future__ import annotations

import sys
from itertools import groupby
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_SPANS = 64


def print_line(text: str) -> None:
    """Write `fabric: text` and a newline in one call, so that lines of several ranks do not mix."""
    sys.stderr.write(f"fabric: {text}\n")
    sys.stderr.flush()


def skip_breakpoint(*args: Any, **kwargs: Any) -> None:
    """Write that `breakpoint()` does nothing here, as sys.breakpointhook of ranks without standard input."""
    print_line("breakpoint() is skipped on this rank, which has no standard input. Rank 0 stops at its own.")


def kind_of(value: Any) -> str:
    """Return the name of a value's class; of what `fabric.setup` returned, the name of the user's class."""
    own = getattr(value, "__dict__", {})
    return type(own.get("_fabric_original", own.get("_fabric_inner", value))).__name__


def show(value: Any) -> str:
    """Return a number, text or None as it is written, and the class of anything else."""
    return f"{value!r:.60}" if value is None or isinstance(value, Real | str) else kind_of(value)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `0, 2-3` for ranks 0, 2 and 3; of more than 64 spans the first 64, and the number of ranks."""
    ordered = sorted(set(ranks))
    spans = [
        [rank for _, rank in run] for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])
    ]
    text = ", ".join([f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans[:_SPANS]])
    return text if len(spans) <= _SPANS else f"{text}, ... ({len(ordered)})"


def name_ranks(ranks: Collection[int]) -> str:
    """Return `rank 3` or `ranks 0, 2-3`."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"


def by_value(values: Mapping[int, Any]) -> str:
    """Return `0, 2-3: 0.1 | 1: 0.05`: the ranks that share each value."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(str(value), []).append(rank)
    return " | ".join([f"{ranks_text(ranks)}: {value}" for value, ranks in groups.items()])
