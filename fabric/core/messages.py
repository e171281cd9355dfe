"""One line to the user on stderr. Imports no torch."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write `fabric: text` and its newline in one piece: lines of several ranks stay lines."""
    sys.stderr.write(f"fabric: {text}\n")
    sys.stderr.flush()
