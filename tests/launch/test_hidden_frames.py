"""Tracebacks of ranks end with the user's line, for errors of this package."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback

import pytest

from fabric.core.errors import UsageError
from fabric.launch.rank_exit import hide_library_frames


def raised(error, below=3):
    """The error, raised by frames of this package below a user's frame."""
    call = {"below": below, "error": error}
    code = "def call(n):\n    if n == 0:\n        raise error\n    call(n - 1)\n"
    from fabric.core import source

    exec(compile(code, source.__file__, "exec"), call)
    with pytest.raises(type(error)) as caught:
        exec(compile("call(below)\n", "train.py", "exec"), call)
    return caught.value


def shown(error):
    whole = error.__traceback__
    with hide_library_frames(error, whole) as (tb, line):
        assert error.__traceback__ is tb
        lines = traceback.format_exception(type(error), error, tb)
    assert error.__traceback__ is whole
    return "".join(lines), line


def test_the_last_frame_is_the_users(monkeypatch):
    monkeypatch.delenv("FABRIC_FULL_TRACEBACK", raising=False)
    text, hidden = shown(raised(UsageError("not so")))
    assert 'File "train.py", line 1' in text
    assert "source.py" not in text
    assert hidden.startswith("fabric: 4 frames below your line are hidden, up to ")
    assert hidden.endswith("source.py:3; FABRIC_FULL_TRACEBACK=1 shows them\n")


def test_one_hidden_frame(monkeypatch):
    monkeypatch.delenv("FABRIC_FULL_TRACEBACK", raising=False)

    from fabric.core import source

    names = {"UsageError": UsageError}
    exec(compile("def fails():\n    raise UsageError('not so')", source.__file__, "exec"), names)
    with pytest.raises(UsageError) as caught:
        exec(compile("fails()\n", "train.py", "exec"), names)
    _, hidden = shown(caught.value)
    assert hidden.startswith("fabric: one frame below your line is hidden, up to ")


def test_other_errors_and_the_variable_show_all(monkeypatch):
    monkeypatch.delenv("FABRIC_FULL_TRACEBACK", raising=False)
    for value, error in (("", RuntimeError("of torch")), ("1", UsageError("not so"))):
        monkeypatch.setenv("FABRIC_FULL_TRACEBACK", value)
        text, hidden = shown(raised(error))
        assert "source.py" in text
        assert hidden == ""


SCRIPT = """
import torch
from fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch()
if fabric.global_rank == 0:
    fabric.all_reduce(torch.ones(1))  # the user's line
else:
    fabric.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("full", ["", "1"])
def test_a_mismatch_shows_the_line_of_the_loop_last(tmp_path, full):
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "FABRIC_FULL_TRACEBACK": full}
    settings = {"cwd": tmp_path, "env": environ, "capture_output": True, "text": True, "timeout": 180}
    done = subprocess.run([sys.executable, "train.py"], **settings)
    files = [line.split('"')[1] for line in done.stderr.splitlines() if '  File "' in line]
    assert done.returncode == 1
    assert files[0].endswith("train.py")
    assert all([file.endswith("train.py") for file in files]) == (full == "")  # of one rank or of both
    assert ("frames below your line are hidden" in done.stderr) == (full == "")
    assert "CollectiveMismatch" in done.stderr.splitlines()[-1]
