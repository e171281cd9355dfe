"""Verbs from several threads of a rank: right one after the other, an error where they overlap or cross."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoint_cases import launched
from torch.utils.data import DataLoader, Dataset

from fabric.core.errors import CollectiveMismatch, RankError
from fabric.guard.threads import _stable_name


class Caller(threading.Thread):
    """A thread that keeps what its function returned, or raised."""

    def __init__(self, function, **kwargs):
        super().__init__(daemon=True, **kwargs)
        self.function, self.result = function, None

    def run(self):
        try:
            self.result = self.function()
        except Exception as error:
            self.result = error


def hands_over():
    """One thread at a time: whichever."""
    fabric = launched("ddp" if torch.distributed.get_world_size() > 1 else "auto")
    rank, mean = float(fabric.global_rank), (fabric.world_size - 1) / 2
    found = [fabric.all_reduce(rank)]
    for _ in range(3):
        caller = Caller(lambda: fabric.all_reduce(torch.full((5000,), rank)).unique().item())
        if fabric.global_rank:
            threading.Thread(name="only here", target=int).start()  # numbers of threads are of a rank
        caller.start()
        caller.join()
        found.append(caller.result)
    with ThreadPoolExecutor(2) as pool:
        found += [pool.submit(fabric.all_reduce, rank).result() for _ in range(20)]
        found.append(fabric.all_reduce(rank))
    assert [float(one) for one in found] == [mean] * len(found)
    x = torch.ones(2, requires_grad=True)
    fabric.all_gather(x, sync_grads=True).sum().backward()
    assert x.grad.tolist() == [fabric.world_size] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_threads_may_take_turns(ranks, world_size):
    ranks.run(hands_over, world_size=world_size)


def overlaps(fifo, large):
    fabric = launched("ddp")
    data = torch.ones(50_000 if large else 1) * fabric.global_rank
    fabric.barrier()
    caller = Caller(lambda: fabric.all_reduce(data).unique().tolist(), name="evaluation")
    detector = fabric.strategy.channel().guard.detector
    if fabric.global_rank:
        fifo.open("r").close()  # until both threads of rank zero have raised
        caller.start()
        caller.join()
        return str(caller.result)
    caller.start()
    while detector.last_thread != caller.ident:
        os.sched_yield()
    with pytest.raises(CollectiveMismatch) as caught:
        fabric.all_reduce(1.0)
    caller.join()
    fifo.open("w").close()
    assert str(caller.result) == str(caught.value)
    with pytest.raises(CollectiveMismatch) as again:
        fabric.barrier()
    assert str(again.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("large", [False, True])
def test_threads_that_overlap_are_named(ranks, tmp_path, large):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text, other = ranks.run(overlaps, fifo, large, world_size=2)
    assert text == other
    assert text.startswith(
        "Two threads of rank 0 call fabric at the same time: 'MainThread' all_reduce(mean) at "
    )
    assert text.count("test_threads_of_a_rank.py:") == 2
    assert "and 'evaluation' at " in text


def crosses():
    """Each rank has the calls of its threads in another order: without the thread's name they would match."""
    fabric = launched("ddp")
    caller = Caller(lambda: fabric.all_reduce(float(fabric.global_rank)), name="evaluation 1")
    fabric.barrier()
    if fabric.global_rank == 1:
        caller.start()
        caller.join()
        error = caller.result
    else:
        with pytest.raises(CollectiveMismatch) as caught:
            fabric.all_reduce(10.0)
        error = caught.value
    assert isinstance(error, CollectiveMismatch)
    with pytest.raises(CollectiveMismatch) as again:  # else the threads that are left would match
        fabric.all_reduce(1.0)
    assert str(again.value) == str(error)
    return str(error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_of_two_threads_in_another_order_on_ranks(ranks, world_size):
    texts = ranks.run(crosses, world_size=world_size)
    assert len({*texts}) == 1
    assert "all_reduce(mean) in thread 'evaluation ' #2" in texts[0]
    assert "Do two threads of a rank make calls? Make all of them in one." in texts[0]


def races():
    fabric = launched("ddp")
    fabric.barrier()

    def work(start):
        for value in range(start, start + 50):
            found = fabric.all_reduce(torch.tensor(float(value))).item()
            assert found == value, f"{found} for {value}"

    callers = [Caller(lambda start=start: work(start)) for start in (0, 1000)]
    [caller.start() for caller in callers]
    [caller.join() for caller in callers]
    return [type(caller.result) for caller in callers]


@pytest.mark.parametrize("world_size", [2, 3])
def test_threads_that_race_have_right_numbers_or_errors(ranks, world_size):
    for kinds in ranks.run(races, world_size=world_size):
        assert {*kinds} <= {type(None), CollectiveMismatch, RankError}


def test_names_of_threads_are_the_same_on_all_ranks():
    both, threads = threading.Barrier(3), []
    for _ in range(2):
        threads.append(threading.Thread(target=both.wait))
    threads.append(threading.Thread(target=int))
    for thread in threads:
        thread.start()
    names = [_stable_name(thread) for thread in threads[:2]]
    both.wait()
    [thread.join() for thread in threads]
    assert names == ["Thread (wait)", "Thread (wait) 1"]


def calls_in_a_worker():
    fabric = launched("ddp")
    fabric.barrier()
    loader = DataLoader(Calls(fabric), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(
        CollectiveMismatch, match=rf"rank {fabric.global_rank} forked .*that is not a rank"
    ) as caught:
        next(iter(loader))
    assert "DataLoader worker process 0" in str(caught.value)
    assert fabric.all_reduce(1.0).item() == 1.0


class Calls(Dataset):
    def __init__(self, fabric):
        self.fabric = fabric

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.fabric.all_reduce(1.0)


def test_a_worker_of_a_loader_is_no_rank(ranks):
    ranks.run(calls_in_a_worker, world_size=2)
