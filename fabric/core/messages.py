"""One line to the user on stderr, and texts of values in messages. Imports no torch."""

from __future__ import annotations

import sys
from numbers import Real
from typing import Any


def print_line(text: str) -> None:
    """Write `fabric: text` and a newline in one call, so that lines of several ranks do not mix."""
    sys.stderr.write(f"fabric: {text}\n")
    sys.stderr.flush()


def kind_of(value: Any) -> str:
    """Return the name of a value's class; of what `fabric.setup` returned, the name of the user's class."""
    own = getattr(value, "__dict__", {})
    return type(own.get("_fabric_original", own.get("_fabric_inner", value))).__name__


def show(value: Any) -> str:
    """Return a number, text or None as it is written, and the class of anything else."""
    return f"{value!r:.60}" if value is None or isinstance(value, Real | str) else kind_of(value)
