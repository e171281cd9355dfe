"""Saves of several processes into one directory, at the same time."""

import os
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest

from fabric import Fabric
from fabric.checkpoint.atomic_write import commit_path, temporary_path

SCRIPT = """
import sys, torch
from fabric import Fabric

path, me, format, times = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
fabric = Fabric(accelerator="cpu", devices=1)
value = torch.full((1 << 18,), float(me))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(times):
    fabric.save(path, {"value": value, "me": me}, format=format)
"""


def started(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("format", ["full", "sharded"])
def test_two_processes_save_to_one_path(tmp_path, format):
    path = tmp_path / "checkpoint"
    processes = [started(path, me, format, 12) for me in (1, 2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=120)[1] for process in processes]
    assert ends == ["", ""]
    found = Fabric(accelerator="cpu", devices=1).load(path)
    assert found["value"].unique().tolist() == [found["me"]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_a_directory_that_a_living_save_writes_stays_and_that_of_a_killed_one_goes(tmp_path):
    path = tmp_path / "checkpoint"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from fabric.checkpoint.formats.sharded.directory import begin\n"
        "print(begin(Path(sys.argv[1])), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as other:
        try:
            part = other.stdout.readline().strip()
            fabric = Fabric(accelerator="cpu", devices=1)
            fabric.save(path, {"step": 1}, format="sharded")
            assert os.path.isdir(part)  # noqa: PTH112
        finally:
            other.kill()
    fabric.save(path, {"step": 2}, format="sharded")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_the_modes_of_what_another_save_sets_aside_meanwhile(tmp_path, monkeypatch):
    """They are read under the lock, in which nobody renames the former checkpoint."""
    path, aside = tmp_path / "checkpoint", tmp_path / "aside"
    path.mkdir()
    path.chmod(0o701)
    part = temporary_path(path, directory=True)
    path.rename(aside)

    @contextmanager
    def lock(directory):
        aside.rename(path)
        yield

    monkeypatch.setattr("fabric.checkpoint.atomic_write.directory_lock", lock)
    commit_path(part, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o701
