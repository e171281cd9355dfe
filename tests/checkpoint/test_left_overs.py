"""Temporary files of saves that were killed: the next save to the path removes them, and no living save's."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from fabric.plugins.io import TorchCheckpointIO

fcntl = pytest.importorskip("fcntl")
OLD, NEW = {"step": 1}, {"step": 2}
SAVER = """
import os, signal, sys, torch
from fabric.plugins.io import TorchCheckpointIO
path, how = sys.argv[1:]
fsync = os.fsync
def stop(fd):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = fsync
    print("writing", flush=True)
    sys.stdin.readline()
    fsync(fd)
os.fsync = stop
TorchCheckpointIO().save_checkpoint({"step": 7, "w": torch.ones(3)}, path)
"""


def saver(path, how):
    code = [sys.executable, "-c", textwrap.dedent(SAVER), str(path), how]
    return subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def parts(folder):
    return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".part"))


def save(data, path):
    TorchCheckpointIO().save_checkpoint(data, path)


def step_at(path):
    return torch.load(path, weights_only=True)["step"]


def killed(path):
    with saver(path, "killed") as process:
        assert process.wait() == -signal.SIGKILL
    return parts(path.parent)


def test_the_next_save_to_the_path_removes_what_a_killed_one_has_left(tmp_path):
    path = tmp_path / "a.pt"
    save(OLD, path)
    assert len(killed(path)) == 1
    save(OLD, tmp_path / "other.pt")
    (tmp_path / ".a.pt.b.0123abcd.part").write_text("of a path of another name")
    assert len(parts(tmp_path)) == 2
    assert step_at(path) == 1
    save(NEW, path)
    assert parts(tmp_path) == [".a.pt.b.0123abcd.part"]
    assert step_at(path) == 2


def test_before_it_writes_which_a_full_disk_may_need(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    killed(path)

    def full(data, file):
        raise OSError(errno.ENOSPC, f"{len(parts(tmp_path))} temporary file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="1 temporary file"):
        save(NEW, path)
    assert parts(tmp_path) == []


def test_a_save_that_lives_keeps_its_file(tmp_path):
    path = tmp_path / "a.pt"
    with saver(path, "waits") as process:
        assert process.stdout.readline() == "writing\n"
        own = parts(tmp_path)
        save(NEW, path)
        assert parts(tmp_path) == own
        assert step_at(path) == 2
        process.communicate("\n")
        assert process.returncode == 0
    assert parts(tmp_path) == []
    assert step_at(path) == 7


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    left = killed(tmp_path / "a.pt")

    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    save(NEW, tmp_path / "a.pt")
    assert parts(tmp_path) == left
    assert step_at(tmp_path / "a.pt") == 2
