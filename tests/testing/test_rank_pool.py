from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fabric.core.errors import ArgumentTypeError, ConfigurationError, RankError, UsageError
from fabric.testing import RankFailure, RankPool, RankTimeout, rank_info
from fabric.testing.worker import child_processes

FOREVER = 3600


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of its own: tests here kill workers, and must not slow the others down."""
    with RankPool(world_size=3, timeout=60.0, warnings_as_errors=True, ignored_warnings=["let me"]) as pool:
        yield pool


def whoami(*args, **kwargs):
    return dist.get_rank(), dist.get_world_size(), args, kwargs


def total():
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor


def facts():
    return {
        "pid": os.getpid(),
        "cwd": str(Path.cwd()),
        "environ": dict(os.environ),
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "random": torch.rand(2).tolist(),
    }


# results


def test_results_come_in_rank_order_with_arguments_passed_on(pool):
    results = pool.run(whoami, 1, "a", key=torch.ones(2), world_size=3)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert all(args == (1, "a") and kwargs["key"].equal(torch.ones(2)) for _, _, args, kwargs in results)


@pytest.mark.parametrize(("world_size", "expected"), [(1, 1.0), (2, 3.0), (3, 6.0), (None, 6.0)])
def test_every_world_size_has_a_working_group(pool, world_size, expected):
    results = pool.run(total, world_size=world_size)
    assert [result.item() for result in results] == [expected] * (world_size or 3)


def test_warm_calls_reuse_the_processes_and_start_alike(pool):
    first, second = pool.run(facts, world_size=2), pool.run(facts, world_size=2)
    assert [fact["pid"] for fact in first] == [fact["pid"] for fact in second] == pool.pids[:2]
    assert first == second, "random state, environment and threads do not depend on earlier calls"
    assert first[0]["random"] == first[1]["random"]
    assert first[0]["threads"] == 1
    assert first[0]["backend"] == "gloo"


def test_ranks_see_the_callers_environment_and_directory(pool, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK_POOL_TEST", "here")
    monkeypatch.chdir(tmp_path)
    fact = pool.run(facts, world_size=1)[0]
    assert (fact["environ"]["RANK_POOL_TEST"], fact["cwd"]) == ("here", str(tmp_path))
    monkeypatch.undo()
    assert "RANK_POOL_TEST" not in pool.run(facts, world_size=1)[0]["environ"]


def test_the_rendezvous_needs_no_environment_variable(pool):
    environ = pool.run(facts, world_size=2)[1]["environ"]
    assert not environ.keys() & {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"}


def meet_by_hand():
    info = rank_info()
    assert not dist.is_initialized()
    dist.init_process_group(
        "gloo", init_method=f"file://{info.store}", rank=info.rank, world_size=info.world_size
    )
    result = total()
    dist.destroy_process_group()
    return result.item()


def test_without_a_group_ranks_may_make_their_own(pool):
    assert pool.run(meet_by_hand, world_size=2, group=False) == [3.0, 3.0]


def test_rank_info_outside_a_pool_says_where_it_works():
    with pytest.raises(UsageError, match=r"RankPool\.run"):
        rank_info()


# failures


class Odd(Exception):
    """Cannot be pickled: its constructor wants two arguments."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"odd {a} {b}")


def fail(error: Exception | type[Exception], *ranks: int):
    if dist.get_rank() in ranks:
        raise error(1, 2) if error is Odd else error
    dist.barrier()
    return "fine"


def test_the_root_cause_comes_first(pool):
    with pytest.raises(RankFailure) as caught:
        pool.run(fail, ValueError("the cause"), 1)
    message = str(caught.value)
    assert message.startswith("fail failed on ranks 0-2 of 3, rank 1 first.\n\nRank 1:\n")
    assert "ValueError: the cause" in message
    assert f'File "{__file__}"' in message, "the traceback points into the user's code"
    assert "testing/worker.py" not in message
    assert next(iter(caught.value.exceptions)) == 1
    assert isinstance(caught.value.exceptions[1], ValueError)
    assert isinstance(caught.value, RankError)
    assert pool.run(total, world_size=2)[0].item() == 3.0


def test_an_exception_that_cannot_be_pickled_keeps_its_text(pool):
    with pytest.raises(RankFailure, match="Odd: odd 1 2") as caught:
        pool.run(fail, Odd, 0, world_size=1)
    assert isinstance(caught.value.exceptions[0], RankError)


def test_run_expecting_errors_gives_errors_in_place_of_values(pool):
    results = pool.run_expecting_errors(fail, KeyError("k"), 0, 1, world_size=2)
    assert [type(result) for result in results] == [KeyError, KeyError]
    assert pool.run_expecting_errors(fail, KeyError("k"), world_size=2) == ["fine", "fine"]


def leave_early():
    sys.exit(3)


def test_sys_exit_is_a_failure_not_a_lost_worker(pool):
    with pytest.raises(RankFailure, match="SystemExit: 3"):
        pool.run(leave_early, world_size=1)


def return_a_lock():
    return threading.Lock()


def test_a_value_that_cannot_be_sent_back_is_named(pool):
    with pytest.raises(RankFailure, match=r"returned a .*lock.*Return plain data or tensors"):
        pool.run(return_a_lock, world_size=1)


def test_a_function_that_cannot_be_sent_is_refused_before_anything_runs(pool):
    def inner():
        """Not at the top level."""

    for function in (inner, lambda: None):
        with pytest.raises(ArgumentTypeError, match="Define the function with `def` at the top level"):
            pool.run(function)
    with pytest.raises(ArgumentTypeError, match="pass plain data"):
        pool.run(whoami, threading.Lock())


class OnlyHere:
    """Pickles in the parent, and fails to come to life on a rank."""

    def __reduce__(self):
        return pickle.loads, (b"not a pickle",)


def test_arguments_that_do_not_arrive_fail_the_call(pool):
    with pytest.raises(RankFailure, match="UnpicklingError"):
        pool.run(whoami, OnlyHere(), world_size=2)


def warn(message: str):
    warnings.warn(message, stacklevel=1)
    return message


def test_warnings_are_errors_where_asked_for_and_not_listed(pool):
    with pytest.raises(RankFailure, match="UserWarning: watch out"):
        pool.run(warn, "watch out", world_size=1)
    assert pool.run(warn, "let me pass", world_size=1) == ["let me pass"]


@pytest.mark.parametrize("world_size", [0, 4, -1])
def test_a_world_size_that_does_not_fit_is_refused(pool, world_size):
    with pytest.raises(ConfigurationError, match=f"world_size={world_size} does not fit"):
        pool.run(whoami, world_size=world_size)


# silence and death


def hang(rank: int, how: str):
    if rank_info().rank == rank:
        sleep_here() if how == "sleep" else os.kill(os.getpid(), signal.SIGSTOP)


def sleep_here():
    time.sleep(FOREVER)


def test_a_silent_rank_is_named_with_its_stack(pool):
    with pytest.raises(RankTimeout) as caught:
        pool.run(hang, 1, "sleep", timeout=3.0, group=False)
    assert caught.value.ranks == (1,)
    assert "hang got no result from rank 1 of 3: no result within 3 s." in str(caught.value)
    assert "in sleep_here" in str(caught.value)
    assert pool.run(total, world_size=2)[0].item() == 3.0


def wait_for_a_worker():
    worker = multiprocessing.get_context("fork").Process(target=sleep_here)
    worker.start()
    worker.join()


def test_what_a_silent_rank_has_forked_is_named_with_its_stack(pool):
    with pytest.raises(RankTimeout) as caught:
        pool.run(wait_for_a_worker, world_size=1, timeout=3.0, group=False)
    own, worker = str(caught.value).split("Its child process")
    assert "in wait_for_a_worker" in own
    assert "in sleep_here" in worker


def skip_a_collective():
    return dist.get_rank() if dist.get_rank() else total()


def test_a_rank_that_waits_in_native_code_is_named_with_its_stack(pool):
    with pytest.raises(RankTimeout, match="in total") as caught:
        pool.run(skip_a_collective, world_size=2, timeout=5.0)
    assert caught.value.ranks == (0,)


def fail_before_the_others_meet():
    if dist.get_rank() == 0:
        raise ValueError("on purpose")
    dist.barrier()


def test_ranks_that_wait_for_those_that_wait_come_to_an_end(ranks):
    """Of four in a ring, the one across hears nothing of the first that failed."""
    errors = ranks.run_expecting_errors(fail_before_the_others_meet, world_size=4)
    assert [type(error).__name__ for error in errors] == ["ValueError", *["RuntimeError"] * 3]


def test_a_stopped_rank_is_named(pool, monkeypatch):
    monkeypatch.setattr("fabric.testing.pool._RELEASE", 0.2)
    with pytest.raises(RankTimeout, match="the process is stopped"):
        pool.run(hang, 0, "stop", world_size=1, timeout=1.0, group=False)


def fail_while_another_sleeps():
    if dist.get_rank() == 0:
        raise ValueError("the cause")
    sleep_here()


def test_a_failure_comes_before_the_silence_that_it_causes(pool, monkeypatch):
    monkeypatch.setattr("fabric.testing.pool._RELEASE", 0.2)
    with pytest.raises(
        RankFailure, match=r"rank 1 did not end(.|\n)*the cause(.|\n)*in sleep_here"
    ) as caught:
        pool.run(fail_while_another_sleeps, world_size=2)
    assert not isinstance(caught.value, RankTimeout)
    assert list(caught.value.exceptions) == [0]


def die(rank: int, number: int):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_rank_is_the_root_cause(pool, number):
    with pytest.raises(RankFailure, match=f"was killed by {number.name}") as caught:
        pool.run(die, 1, number, world_size=2)
    assert next(iter(caught.value.exceptions)) == 1
    assert pool.run(total, world_size=2)[0].item() == 3.0


def exit_at_once():
    os._exit(7)


def test_an_exit_code_is_named(pool):
    with pytest.raises(RankFailure, match="exited with code 7"):
        pool.run(exit_at_once, world_size=1)


def test_a_worker_that_died_between_calls_is_replaced(pool):
    pool.run(whoami, world_size=1)
    pid = pool.pids[0]
    os.kill(pid, signal.SIGKILL)
    pool._workers[0].process.join(10)
    assert pool.run(total, world_size=2)[0].item() == 3.0
    assert pid not in pool.pids


# traces


def leak(what: str):
    if what == "environment":
        os.environ["RANK_POOL_LEAK"] = "1"
    elif what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "threads":
        torch.set_num_threads(2)
    elif what == "signal":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif what == "child":
        subprocess.Popen(["sleep", str(FOREVER)])
    elif what == "thread":
        threading.Thread(target=sleep_here, name="lost").start()
    elif what == "destroy":
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("environment", "environment variable RANK_POOL_LEAK left: 1"),
        ("dtype", r"default dtype changed from torch\.float32 to torch\.float64"),
        ("threads", "number of torch threads changed from 1 to 2"),
        ("signal", "signal handler SIGTERM changed"),
        ("child", rf"child process \d+ left: sleep {FOREVER}"),
        ("thread", "thread lost left"),
        ("destroy", "default process group destroyed"),
    ],
)
def test_traces_are_named_and_do_not_reach_the_next_call(pool, what, named):
    with pytest.raises(RankFailure, match=named):
        pool.run(leak, what, world_size=1)
    pool.run(leak, "nothing", world_size=1)


def init_and_forget():
    info = rank_info()
    dist.init_process_group("gloo", init_method=f"file://{info.store}", rank=0, world_size=1)


def test_a_group_left_initialised_is_a_trace(pool):
    with pytest.raises(RankFailure, match="default process group left initialised"):
        pool.run(init_and_forget, world_size=1, group=False)


# life of the pool


def test_close_ends_all_processes_and_the_pool():
    with RankPool(world_size=2) as pool:
        pids = pool.run(os.getpid, group=False)
        assert pids == pool.pids
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)
    with pytest.raises(UsageError, match="closed"):
        pool.run(os.getpid)
    pool.close()


def test_an_unused_pool_starts_nothing():
    before = child_processes()
    with RankPool(world_size=2) as pool:
        assert pool.pids == []
    assert child_processes() == before
    with pytest.raises(ConfigurationError, match="must be a whole number, 1 or more"):
        RankPool(world_size=0)


PARENT = """
import os, signal, sys
from fabric.testing import RankPool
from tests_rank_pool_helper import sleep_with_child

if __name__ == "__main__":
    pool = RankPool(world_size=2)
    print(*pool.run(os.getpid, group=False), flush=True)
    if sys.argv[1] == "idle":
        os.kill(os.getpid(), signal.SIGKILL)
    elif sys.argv[1] == "busy":
        pool.run(sleep_with_child, os.getpid())
"""

HELPER = """
import os, signal, subprocess, time
import torch.distributed as dist

def sleep_with_child(parent):
    child = subprocess.Popen(["sleep", "3600"])
    dist.barrier()
    if dist.get_rank() == 0:
        print(child.pid, flush=True)
        os.kill(parent, signal.SIGKILL)
    time.sleep(3600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["idle", "busy", "forgotten"])
def test_workers_end_with_the_parent(tmp_path, how):
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "tests_rank_pool_helper.py").write_text(HELPER)
    # The pipe reaches its end only when the last process that holds it, rank or child, is gone.
    done = subprocess.run(
        [sys.executable, "parent.py", how],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    pids = done.stdout.split()
    assert len(pids) == {"idle": 2, "busy": 3, "forgotten": 2}[how]
    assert done.returncode == (0 if how == "forgotten" else -signal.SIGKILL)
