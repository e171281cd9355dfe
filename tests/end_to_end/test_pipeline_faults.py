"""A stage of a real pipeline raises or is killed: the job ends, and its last line names the cause."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SUBJECT = Path(__file__).parent / "scripts" / "staged.py"
pytestmark = pytest.mark.slow


CELLS = [
    ("popen", "raise", "forward"),
    ("popen", "raise", "backward-step"),
    ("popen", "kill", "backward"),
    ("popen", "kill", "forward-step"),
    ("spawn", "raise", "backward"),
    ("spawn", "kill", "forward"),
]


@pytest.mark.parametrize(("start", "how", "when"), CELLS)
def test_the_stage_that_ended_is_named(start, how, when):
    done = subprocess.run(
        [sys.executable, str(SUBJECT), start, "1", how, when],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == {"raise": 1, "kill": 137}[how], done.stderr
    reason = {
        "raise": r"ValueError: boom \(staged\.py:\d+\)",
        "kill": r"killed by SIGKILL \(by a user, .*?\)",
    }[how]
    host = re.escape(socket.gethostname())
    line = f"rank 1 on {host} failed first: {reason}; ranks 0, 2 stopped because of it"
    assert len(re.findall(line, done.stderr)) == 1, done.stderr
    assert "Connection closed" not in done.stderr
    if start == "popen":
        last = [text for text in done.stderr.splitlines() if text.strip()][-1]
        assert re.fullmatch(f"fabric: {line}", last), done.stderr
        assert done.stderr.count("Traceback") == (how == "raise"), done.stderr
