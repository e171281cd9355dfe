"""The line that initialised CUDA is named: noted by torch's own queue of calls."""

from __future__ import annotations

import subprocess
import sys

import pytest

DRIVER = """
import gc, sys, threading, weakref
import torch
from fabric import Fabric

def forking(strategy="ddp_fork"):
    return Fabric(accelerator="cpu", devices=2, strategy=strategy)

if not torch.cuda.is_available():
    # What torch asks of a driver before it runs what waits for CUDA.
    torch._C._cuda_getDeviceCount = lambda: 1
    torch._C._cuda_init = lambda: None
    torch.cuda._cudart = torch.cuda._cudart or object()
    torch.cuda._queued_calls.clear()  # builds for CUDA look at the cards there

def move(value):
    try:
        return value.cuda()  # the touch
    except (NotImplementedError, RuntimeError):  # initialised; but this build has no kernels for it
        return None

def refusal(fabric):
    try:
        fabric.launch(print)
    except RuntimeError as error:
        return str(error)
"""


def run(tmp_path, body):
    """What a script prints whose first lines are DRIVER; it is called `job.py`."""
    script = tmp_path / "job.py"
    script.write_text(DRIVER + body)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_users_innermost_line_is_named(tmp_path):
    body = "fabric = forking()\nmove(torch.ones(1))\nprint(torch.cuda.is_initialized(), refusal(fabric))\n"
    touch = (DRIVER.splitlines().index("        return value.cuda()  # the touch")) + 1
    assert run(tmp_path, body) == (
        f"True CUDA is initialised in this process, by job.py:{touch} (return value.cuda()  # the touch), "
        "and a forked rank cannot use it again. Move that line into the launched function (in a notebook: "
        'restart the kernel first), or use strategy="ddp_spawn".\n'
    )


def test_without_a_note_the_error_says_what_to_look_for(tmp_path):
    body = "move(torch.ones(1))\nprint(refusal(forking()))\n"
    assert run(tmp_path, body) == (
        "CUDA is initialised in this process, and a forked rank cannot use it again. Move the first .cuda(), "
        ".to('cuda') or torch.cuda call into the launched function (in a notebook: restart the kernel "
        'first), or use strategy="ddp_spawn".\n'
    )


def test_only_a_launcher_that_forks_queues_and_only_once(tmp_path):
    body = """
import fabric.strategies.launchers.multiprocess
def mine():
    return [call.__module__ for call, _ in torch.cuda._queued_calls if call.__module__.startswith("fabric")]
print(mine())
forking("ddp_spawn"), forking("ddp")
print(mine())
forking(), forking("ddp_notebook")
print(mine())
"""
    assert run(tmp_path, body) == "[]\n[]\n['fabric.strategies.launchers.cuda_touched']\n"


def test_no_frame_is_kept(tmp_path):
    body = """
class Large:
    pass
def work():
    large = Large()
    move(torch.ones(1))
    return weakref.ref(large)
fabric = forking()
gc.disable()
print(work()() is None, "job.py" in refusal(fabric))
"""
    assert run(tmp_path, body) == "True True\n"


@pytest.mark.parametrize(
    "failing", ["linecache.getline", "fabric.strategies.launchers.cuda_touched.is_users"]
)
def test_a_failing_note_does_not_hurt_cuda(tmp_path, failing):
    module, _, name = failing.rpartition(".")
    body = f"""
import importlib
def fail(*_):
    raise OSError("no such file")
fabric = forking()
setattr(importlib.import_module({module!r}), {name!r}, fail)
move(torch.ones(1))
print(torch.cuda.is_initialized(), refusal(fabric)[:45])
"""
    assert run(tmp_path, body) == "True CUDA is initialised in this process, and a fo\n"


def test_a_touch_on_another_thread_and_deep_in_torch(tmp_path):
    body = """
fabric = forking()
def count():
    torch.nn.Linear(1, 1).apply(lambda module: move(module.weight))
thread = threading.Thread(target=count)
thread.start()
thread.join()
print(refusal(fabric))
"""
    assert "by job.py:" in (text := run(tmp_path, body))
    assert "(return value.cuda()  # the touch)" in text
