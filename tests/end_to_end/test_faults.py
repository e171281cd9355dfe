"""The fault matrix: launchers and the ways in which a rank ends, on real processes.

Each cell ends by itself, names the cause once and last, exits with the cause's code and leaves no process.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from fabric.core.messages import name_ranks

SUBJECT = Path(__file__).parent / "scripts" / "faults.py"
LAUNCHERS = ["script", "cli", "spawn", "fork", "forkserver"]
FUNCTIONS = ["spawn", "fork", "forkserver"]
REASONS = {
    "raise": (r"ValueError: boom \(faults\.py:\d+\)", 1),
    "exit": ("exit code 3", 3),
    "abort": (r"killed by SIGABRT \(native code aborted; gloo .*?\)", 134),
    "kill": (r"killed by SIGKILL \(by a user, .*?\)", 137),
}
CELLS = [
    ("script", 0, "raise", "compute"),
    ("script", 1, "raise", "collective"),
    ("script", 0, "kill", "collective"),
    ("script", 1, "abort", "backward"),
    ("cli", 0, "kill", "collective"),
    ("cli", 1, "exit", "loader"),
    ("spawn", 0, "kill", "sleep"),
    ("spawn", 1, "raise", "backward"),
    ("fork", 1, "raise", "collective"),
    ("fork", 0, "exit", "collective"),
    ("fork", 1, "abort", "loader"),
    ("fork", 0, "kill", "backward"),
    ("forkserver", 1, "raise", "loader"),
    ("forkserver", 0, "abort", "compute"),
]
"""Launcher, the rank that ends, how, and what the others do."""
SECONDS = 120
ECHOES = ("Connection closed", "RankError", "recvValue", "Broken pipe", "KeyboardInterrupt")
pytestmark = pytest.mark.slow


class Job:
    """A subject in a session of its own. All its descendants carry a mark in their environment."""

    def __init__(self, launcher, victim, how, others, *options):
        head = [sys.executable, str(SUBJECT)]
        if launcher == "cli":
            head = [sys.executable, "-m", "fabric", "run", *options, "--devices=2", str(SUBJECT)]
        self.mark = f"FABRIC_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [*head, launcher, str(victim), how, others],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", name: value},
            start_new_session=True,
        )
        self.ranks = 3 if launcher == "fork" and others != "native" else 2

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in [*self.alive(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate()

    def ready(self):
        """Wait until every rank is where it will stay."""
        for _ in range(self.ranks):
            assert "ready" in self.process.stdout.readline(), self.process.stderr.read()

    def finish(self):
        self.out, err = self.process.communicate(timeout=SECONDS)
        self.lines = [line for line in err.splitlines() if line.strip()]
        self.err = err
        return self.process.returncode

    def alive(self):
        """The descendants that are left."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark.encode() in (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if marked and state not in "ZX":
                found.append(int(entry.name))
        return found

    def assert_gone(self):
        deadline = time.monotonic() + 10  # 5 by promise; the machine may be slow
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)  # waits for an end that nothing here can be told of
        assert left == [], [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]

    def assert_cause(self, launcher, victim, how):
        reason, _ = REASONS[how]
        if launcher == "script" and victim == 0 and how == "kill":
            reason = r"killed by a signal, or ended by os\._exit"
        rest = [rank for rank in range(self.ranks) if rank != victim]
        line = (
            f"rank {victim} on {re.escape(socket.gethostname())} failed first: {reason}; "
            f"{name_ranks(rest)} stopped because of it"
        )
        assert len(re.findall(line, self.err)) == 1, self.err
        function = launcher in FUNCTIONS  # the launching process raises, and shows its own traceback
        start = "fabric.core.errors.LaunchError" if function else "fabric"
        assert re.fullmatch(f"{start}: {line}", self.lines[-1]), self.err
        assert self.err.count("Traceback (most recent") == (how == "raise") + function, self.err
        assert self.err.count("ValueError: boom") == 2 * (how == "raise"), self.err
        assert bool(re.search(r'faults\.py", line \d+,? in end\n', self.err)) == (
            how in ("raise", "abort")
        ), self.err
        assert not [word for word in ECHOES if word in self.err], self.err


def rotating(*others):
    """Each launcher with one of these."""
    return [(launcher, others[place % len(others)]) for place, launcher in enumerate(LAUNCHERS)]


@pytest.mark.parametrize(("launcher", "victim", "how", "others"), CELLS)
def test_a_rank_ends_badly(launcher, victim, how, others):
    with Job(launcher, victim, how, others) as job:
        code = job.finish()
        first = launcher == "script" and victim == 0  # which is the process that was started
        assert code == (-signal.SIGKILL if first and how == "kill" else REASONS[how][1]), job.err
        job.assert_cause(launcher, victim, how)
        job.assert_gone()


@pytest.mark.parametrize(
    ("number", "launcher", "others"),
    [(signal.SIGKILL, *cell) for cell in rotating("compute", "native", "loader")[::2]]
    + [(signal.SIGTERM, *cell) for cell in rotating("native", "loader", "compute")],
)
def test_the_process_that_started_the_ranks_is_ended(launcher, number, others):
    with Job(launcher, -1, "", others) as job:
        job.ready()
        job.process.send_signal(number)
        code = job.finish()
        asked = number == signal.SIGTERM and launcher == "cli"
        assert code == (128 + number if asked else -number), job.err
        assert "Traceback" not in job.err
        job.assert_gone()


@pytest.mark.parametrize(("launcher", "others"), rotating("compute", "native"))
def test_ctrl_c_until_it_ends(launcher, others):
    with Job(launcher, -1, "", others) as job:
        job.ready()
        pressed = 0
        while job.process.poll() is None and pressed < 8:
            os.killpg(job.process.pid, signal.SIGINT)  # as the terminal does
            pressed += 1
            try:
                job.process.wait(0.8)  # a person's next press
            except subprocess.TimeoutExpired:
                continue
        job.finish()
        assert pressed < 8
        job.assert_gone()


@pytest.mark.parametrize(("launcher", "how"), rotating("leave", "leave at once"))
def test_a_rank_leaves_while_another_needs_it(launcher, how):
    with Job(launcher, 1, how, "collective") as job:
        assert job.finish() == 1
        reason = r"finished \(exit 0\) while rank \d waits in fabric.all_reduce "
        assert re.search(rf"rank 1 on \S+ failed first: {reason}", job.err), job.err
        job.assert_gone()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sigterm_to_the_process_that_started_the_ranks_is_a_request_to_all(launcher):
    with Job(launcher, -1, "", "stop") as job:
        job.ready()
        job.process.send_signal(signal.SIGTERM)
        assert job.finish() == 0, job.err
        assert job.out.splitlines() == ["stopped"] * job.ranks
        assert job.err == ""
        job.assert_gone()


def test_a_log_for_each_rank(tmp_path):
    logs = tmp_path / "logs"
    with Job("cli", 1, "raise", "collective", "--log-dir", str(logs)) as job:
        assert job.finish() == 1
        assert sorted(job.out.splitlines()) == ["[rank 0] ready", "[rank 1] ready"]
        assert sorted(path.name for path in logs.iterdir()) == [
            "rank0.err",
            "rank0.out",
            "rank1.err",
            "rank1.out",
        ]
        assert (logs / "rank0.out").read_text() == (logs / "rank1.out").read_text() == "ready\n"
        assert "[rank 1] [rank1]: ValueError: boom" in job.err
        assert (logs / "rank1.err").read_text().splitlines()[-1] == "[rank1]: ValueError: boom"
        assert "Connection closed" not in job.err
        assert re.search(r"fabric: rank 1 on \S+ failed first", job.lines[-1])
