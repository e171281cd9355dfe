"""The code blocks of the pages, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "fabric/**/*.md", "examples/*.md", "benchmarks/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)


class Block(NamedTuple):
    """A code block: its page, the line on which its code begins, its language, its code."""

    page: str
    line: int
    language: str
    code: str


def blocks() -> list[Block]:
    """All code blocks of all pages, in order."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            found.append(Block(page, text[: match.start()].count("\n") + 2, match[1], match[2]))
    return found


def sides(diff: str) -> dict[str, str]:
    """The two programs of a diff, "-" and "+"."""
    lines = diff.splitlines()
    return {
        sign: "".join([line[1:] + "\n" for line in lines if line[:1] in (" ", "", sign)]) for sign in "-+"
    }


def sides_of_readme() -> dict[str, str]:
    """The two programs of the README."""
    (diff,) = [block for block in blocks() if (block.page, block.language) == ("README.md", "diff")]
    return sides(diff.code)
