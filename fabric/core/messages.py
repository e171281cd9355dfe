"""One line to the user on stderr. Imports no torch."""

from __future__ import annotations

import sys


def print_line(text: str) -> None:
    """Write `fabric: text` and a newline in one call, so that lines of several ranks do not mix."""
    sys.stderr.write(f"fabric: {text}\n")
    sys.stderr.flush()
