"""`fabric.should_stop()`: ranks stop at the same step, whichever was asked to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from fabric import Fabric
from fabric.core.errors import CollectiveMismatch, ConfigurationError
from fabric.plugins.environments import SLURMEnvironment
from fabric.preemption.stopping import Stopper, deadline


@contextmanager
def launched(**variables):
    os.environ.update(variables)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    try:
        yield fabric
    finally:
        if fabric._stopper is not None:
            fabric._stopper.restore()
        for name in variables:
            del os.environ[name]


@contextmanager
def restored(number, handler):
    try:
        yield
    finally:
        signal.signal(number, handler)


def steps(number, asked):
    """The step at which this rank stops; rank `asked` gets the signal in step 3."""
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and stays so
    with launched() as fabric, restored(number, before):
        for step in range(10):
            if fabric.should_stop():
                return step, fabric.should_stop()
            if step == 3 and fabric.global_rank == asked:
                os.kill(os.getpid(), number)
    return None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize("asked", [0, 2])
def test_all_ranks_stop_at_the_same_step(ranks, number, asked):
    assert ranks.run(steps, number, asked, world_size=3) == [(4, True)] * 3


def near_deadline(end):
    with launched(FABRIC_DEADLINE=end if dist.get_rank() == 1 else "9999999999") as fabric:
        return fabric.should_stop()


def test_the_deadline_of_one_rank_stops_all(ranks):
    assert ranks.run(near_deadline, str(time.time() + 60), world_size=2) == [True, True]
    assert ranks.run(near_deadline, str(time.time() + 3600), world_size=2) == [False, False]


def bad_deadline():
    with launched(FABRIC_DEADLINE="soon" if dist.get_rank() == 1 else "9999999999") as fabric:
        try:
            fabric.should_stop()
        except (ConfigurationError, CollectiveMismatch) as error:
            text = str(error)
        fabric.barrier()
        return text


def test_a_deadline_that_one_rank_cannot_read_is_an_error_on_all(ranks):
    first, second = ranks.run(bad_deadline, world_size=2)
    assert (
        "FABRIC_DEADLINE=soon with FABRIC_DEADLINE_MARGIN=None is no number. Write seconds since 1970"
        in first
    )
    assert (
        "FABRIC_DEADLINE=soon with FABRIC_DEADLINE_MARGIN=None is no number. Write seconds since 1970"
        in second
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1000", 880.0), ("1000.5", 880.5), ("", None)],
)
def test_deadlines(monkeypatch, text, expected):
    monkeypatch.setenv("FABRIC_DEADLINE", text)
    assert deadline() == expected


def test_a_date_is_no_number_of_seconds(monkeypatch):
    monkeypatch.setenv("FABRIC_DEADLINE", "2026-11-21T18:30:00")
    with pytest.raises(ConfigurationError, match=r"Write seconds since 1970, as printed by `date \+%s"):
        deadline()


def test_slurms_end_counts_where_no_other_is_set(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "5000")
    monkeypatch.setenv("FABRIC_DEADLINE_MARGIN", "300")
    assert deadline() == 4700.0
    monkeypatch.setenv("FABRIC_DEADLINE", "1000")
    assert deadline() == 700.0
    monkeypatch.setenv("FABRIC_DEADLINE_MARGIN", "a while")
    with pytest.raises(ConfigurationError, match=r"MARGIN=a while is no number.* for the margin a number"):
        deadline()


def test_handlers_of_the_user_are_called_and_put_back():
    seen = []
    mine = lambda number, frame: seen.append(number)  # noqa: E731
    before = signal.signal(signal.SIGUSR1, mine)
    try:
        stopper = Stopper()
        assert not stopper.is_requested()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopper.is_requested()
        assert stopper.reason == "SIGUSR1"
        assert seen == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] * 2, "the second goes to the user alone"
        stopper.restore()
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_end_of_a_terminal_under_nohup_is_none():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopper = Stopper()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stopper.is_requested()
    finally:
        stopper.restore()
        signal.signal(signal.SIGHUP, before)


def test_the_signal_that_slurm_was_asked_for():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.strategy.cluster_environment = SLURMEnvironment(requeue_signal=signal.SIGUSR2)
    try:
        assert not fabric.should_stop()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert fabric.should_stop()
    finally:
        fabric._stopper.restore()


def run(script):
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_child_that_was_forked_dies_as_ever():
    script = (
        "import multiprocessing, time\nfrom fabric.preemption.stopping import Stopper\nstopper = Stopper()\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "child.start()\nchild.terminate()\nchild.join()\nprint(child.exitcode, stopper.is_requested())\n"
    )
    done = run(script)
    assert done.stdout == "-15 False\n", done.stderr


@pytest.mark.parametrize("thread", [False, True])
def test_a_child_that_was_forked_dies_in_native_code(thread):
    script = (
        "import os, signal, threading\nimport ctypes\nfrom fabric.preemption.stopping import Stopper\n"
        "stopper = Stopper()\nreader, writer = os.pipe()\n"
        "def fork():\n    pid = os.fork()\n    if pid == 0:\n        os.write(writer, b'1')\n"
        "        lock = ctypes.create_string_buffer(64)\n        ctypes.CDLL(None).pthread_mutex_lock(lock)\n"
        "        ctypes.CDLL(None).pthread_mutex_lock(lock)\n"
        "        os._exit(0)\n    os.read(reader, 1)\n"
        "    while open(f'/proc/{pid}/stat').read().rpartition(') ')[2][0] != 'S':\n        pass\n"
        "    os.kill(pid, signal.SIGTERM)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), stopper.is_requested(), flush=True)\n"
    )
    script += "t = threading.Thread(target=fork)\nt.start()\nt.join()\n" if thread else "fork()\n"
    script += "os.kill(os.getpid(), signal.SIGTERM)\nprint(stopper.is_requested())\n"
    done = run(script)
    assert done.stdout == "-15 False\nTrue\n", done.stderr


def test_a_child_that_was_forked_dies_at_once():
    script = (
        "import os, signal\nfrom fabric.preemption.stopping import Stopper\nstopper = Stopper()\n"
        "codes = set()\nfor _ in range(300):\n    pid = os.fork()\n    if pid == 0:\n"
        "        signal.pause()\n    os.kill(pid, signal.SIGTERM)\n"
        "    codes.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "print(codes, stopper.is_requested())\n"
    )
    done = run(script)
    assert done.stdout == "{-15} False\n", done.stderr


def test_what_a_fork_has_copied_is_passed_over():
    script = (
        "import os, signal\nfrom fabric.launch.signals import Handlers\n"
        "from fabric.preemption.stopping import Stopper\n"
        "seen = []\nhandlers = Handlers([signal.SIGTERM], lambda *_: seen.append('of the parent'))\n"
        "if os.fork() == 0:\n    stopper = Stopper()\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(stopper.is_requested(), seen, flush=True)\n    os._exit(0)\nos.wait()\n"
    )
    done = run(script)
    assert done.stdout == "True []\n", done.stderr


def test_a_second_signal_ends_at_once():
    script = (
        "import os, signal\nfrom fabric.preemption import stopping\nstopper = stopping.Stopper()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint(stopper.is_requested(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint('the same request, by another way', flush=True)\n"
        "stopping.DUPLICATE_SIGNAL_S = 0\nos.kill(os.getpid(), signal.SIGTERM)\nprint('still here')\n"
    )
    done = run(script)
    assert done.stdout == "True\nthe same request, by another way\n"
    assert done.returncode == -signal.SIGTERM
