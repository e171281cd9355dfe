"""What tests of real engines share: jobs that cannot outlive their test, and their output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = sys.executable
LIMIT = 180
"""Seconds after which a job is killed, whatever the machine is busy with."""


def environ(**more: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | more


def until(condition, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def facts(text: str, kind: str = "rank") -> list[dict]:
    """The JSON lines of the ranks, by rank, that have this key."""
    lines = [json.loads(line[line.index("{") :]) for line in text.splitlines() if '{"rank"' in line]
    return sorted([line for line in lines if kind in line], key=lambda line: line["rank"])


def check_facts(found: list[dict], alone: dict, world_size: int = 2) -> None:
    assert [line["rank"] for line in found] == list(range(world_size))
    for line in found:
        assert line["world_size"] == world_size
        assert line["loss"] == pytest.approx(alone["loss"], abs=2e-5)
        assert line["weights"] == pytest.approx(alone["weights"], abs=2e-5)


def check_resumed(text: str, whole: str, begins: int) -> None:
    """The output of scripts/resumed.py has two lives; the second began after this step, and went to the end.

    Args:
        text: Of the run with two lives.
        whole: Of one that nothing disturbed.
        begins: The step of the last save.
    """
    lives = [(line["life"], line["rank"], line["begins"]) for line in facts(text, "begins")]
    assert sorted(lives) == [(0, 0, 0), (0, 1, 0), (1, 0, begins), (1, 1, begins)]
    losses = {(line["rank"], line["step"]): line["loss"] for line in facts(whole, "step")}
    assert sorted(losses) == [(rank, step) for rank in (0, 1) for step in range(1, 25)]
    for line in facts(text, "step"):
        assert line["loss"] == losses[line["rank"], line["step"]]
    second = [(line["rank"], line["step"]) for line in facts(text, "step") if line["life"] == 1]
    assert second == [(rank, step) for rank in (0, 1) for step in range(begins + 1, 25)]
    expected = facts(whole, "weights")[0]["weights"]
    assert [line["weights"] for line in facts(text, "weights")] == [expected, expected]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Job:
    """A command that writes to files, in a process group of its own; `with` ends it in any case."""

    def __init__(self, command: list[str], files: Path, limit: int = LIMIT, **env: str) -> None:
        self.command, self._limit = command, limit
        self._out, self._err = files.with_suffix(".out"), files.with_suffix(".err")
        with self._out.open("w") as out, self._err.open("w") as err:
            # Should this process be killed, `timeout` ends the job.
            bounded = ["timeout", "-k", "5", str(limit), *command]
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            self.process = subprocess.Popen(bounded, **streams, env=environ(**env), start_new_session=True)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def says(self, count: int, kind: str) -> list[dict]:
        """Wait until it has printed so many JSON lines with this key."""
        until(lambda: len(facts(self.out, kind)) >= count or self.process.poll() is not None, self._limit)
        found = facts(self.out, kind)
        assert len(found) >= count, f"{self.command}\n{self.out}\n{self.err}"
        return found

    def ends(self, seconds: float | None = None) -> int:
        """Its exit code, once it has ended by itself within so many seconds."""
        seconds = seconds or self._limit
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within {seconds} s: {self.command}\n{self.out}\n{self.err}")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
