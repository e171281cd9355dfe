"""`prefix_output`: begins each line that a rank prints with `[rank 1] `; see FABRIC_PREFIX_RANKS. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX_RANKS = "FABRIC_PREFIX_RANKS"
"""Variable with the ranks whose lines have a prefix: OTHER_RANKS; none ("", "0", "off"); else all."""
OTHER_RANKS = "others"
"""All ranks but rank 0. What `fabric run` sets."""


def prefix_output(rank: int) -> None:
    """Begin each line of `sys.stdout` and `sys.stderr` with the rank. A second call does nothing.

    The streams stay the same objects, so loggers made earlier have the prefix, too, and `isatty()` is the
    terminal's. Output of native code and of subprocesses has no prefix.
    """
    ranks = os.environ.get(PREFIX_RANKS, "").lower()
    if ranks in ("", "0", "off") or (ranks == OTHER_RANKS and rank == 0):
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is None or isinstance(stream.write, LinePrefix):
            continue
        with contextlib.suppress(AttributeError, TypeError):  # a stream of another tool: no such attributes
            stream.write = LinePrefix(stream.write, f"[rank {rank}] ")  # type: ignore[method-assign]
            # whole lines, to a pipe and under `python -u` (torchrun), where ranks' parts of lines would mix
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


class LinePrefix:
    """A `write` method that inserts a prefix at the first character of each line.

    A line that begins with a carriage return is left as it is: it is a progress bar, as wide as the terminal.

    Args:
        write: The stream's own method.
        prefix: The text to insert.
    """

    def __init__(self, write: Callable[[str], int], prefix: str) -> None:
        self._write, self._prefix = write, prefix
        self._at_line_start = True

    def __call__(self, text: str) -> int:
        """Write the text in one call, and return its length."""
        if not text:
            return 0
        lines = re.sub(r"(?<=\n)(?=[^\r\n])", lambda _: self._prefix, text)
        if self._at_line_start and text[0] not in "\r\n":
            lines = self._prefix + lines
        self._at_line_start = text[-1] in "\r\n"
        self._write(lines)
        return len(text)
