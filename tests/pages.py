"""The code blocks of the pages, for the tests that run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from warm import WarmPython

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*", "fabric/**/*", "docs/**/*", "examples/*", "benchmarks/*", "tests/**/*")
    for path in ROOT.glob(f"{pattern}.md")
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


TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
"""On a port of its own: tests of other processes have theirs."""


def lives_of(program: str, folder: Path, processes: int = 2, warm: WarmPython | None = None) -> list[float]:
    """The numbers that a program prints, interrupted after half of its epochs and started again.

    With `warm` its ranks are forked, with the variables of torchrun; else it is started cold.
    """
    folder.mkdir()
    program = program.replace("devices=2", f"devices={processes}")
    by_hand = re.search("init_process_group|Accelerator|deepspeed.init", program)
    launcher = [*TORCHRUN, f"--nproc-per-node={processes}"] if by_hand else []
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ["PYTHONUNBUFFERED"] = "1"  # a rank that is aborted at its exit has printed its lines
    environ.pop("FABRIC_PREFIX_RANKS", None)  # see conftest.py: pages show what a user sees
    settings = {"cwd": folder, "env": environ}
    script, printed = folder / "train.py", ""
    for life in ["epochs = 2", "epochs = 4"] if "epochs = 4" in program else [""]:
        script.write_text(program.replace("epochs = 4", life))
        if warm is not None:
            done = warm.torchrun(script, ranks=processes)
        else:
            command = [sys.executable, *launcher, script.name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=500, **settings)
        aborted_at_exit = by_hand and "terminate called without an active exception" in done.stderr
        assert done.returncode == 0 or aborted_at_exit, done.stderr  # pytorch#190489
        printed += done.stdout
    return [float(number) for number in re.findall(r"\d+\.\d+", printed)]
