"""Ranks whose loaders are out of step, or whose data or samplers differ, are told so; nothing is lost
silently.
"""

from __future__ import annotations

import random
import warnings

import numpy
import pytest
import torch
from data_cases import Indices, Numbers, in_workers, launched, rows
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from fabric.core.errors import CollectiveMismatch, ConfigurationError, UsageError


class Shuffled:
    """A sampler that draws from a generator of its own."""

    def __init__(self, n, generator):
        self.n, self.generator_of_mine = n, generator

    def __iter__(self):
        order = list(range(self.n))
        if isinstance(self.generator_of_mine, torch.Generator):
            order = torch.randperm(self.n, generator=self.generator_of_mine).tolist()
        else:
            self.generator_of_mine.shuffle(order)
        return iter(order)

    def __len__(self):
        return self.n


# out of step


def differing(how):
    fabric = launched()
    rank = fabric.global_rank
    if how == "generator":
        loader = DataLoader(Indices(16), 2, shuffle=True, generator=torch.Generator().manual_seed(rank))
    elif how == "sampler":
        loader = DataLoader(Indices(16), 2, sampler=Shuffled(16, random.Random(rank)))
    elif how == "stream":
        loader = DataLoader(Numbers(16), 2)
    else:
        loader = DataLoader(Indices(16), batch_size=2, shuffle=True)
    ready = fabric.setup_dataloaders(loader)
    if how in ("peek", "stream") and rank == 0:
        next(iter(ready))
    if how == "position":
        batches = iter(ready)
        next(batches), next(batches)
        state = ready.state_dict()
        ready = fabric.setup_dataloaders(loader)
        if rank == 1:
            ready.load_state_dict(state)
    try:
        rows(ready)
    except UsageError as error:
        return str(error), float(fabric.all_reduce(1.0))
    return "", 1.0


@pytest.mark.parametrize(
    ("how", "table"),
    [
        ("peek", ["epoch 1", "epoch 0"]),
        ("stream", ["epoch 1", "epoch 0"]),
        ("generator", ["order ["] * 2),
        ("sampler", ["order ["] * 2),
        ("position", ["position 0", "position 8"]),
    ],
)
def test_ranks_that_iterate_differently_are_told_at_the_second_batch(ranks, how, table):
    first, second = ranks.run(differing, how, world_size=2)
    assert first == second, "all ranks raise the same, and can go on"
    lines = first[0].splitlines()
    assert lines[0] == "The ranks iterate this loader differently, so samples would be repeated and lost:"
    for rank, text in enumerate(table):
        assert lines[1 + rank].startswith(f"  rank {rank}: ")
        assert text in lines[1 + rank]


def peek_alone():
    fabric = launched()
    ready = fabric.setup_dataloaders(DataLoader(Indices(8), batch_size=2))
    seen = rows_of_one(ready) if fabric.global_rank == 0 else None
    fabric.barrier()
    for epoch in range(2):
        ready.set_epoch(epoch)
        rows(ready)
    with torch.no_grad():
        if fabric.global_rank == 0:
            rows(ready)
    fabric.barrier()
    return seen


def rows_of_one(loader):
    return next(iter(loader)).tolist()


def test_looking_at_a_batch_on_one_rank_is_free_and_so_is_evaluation(ranks):
    assert ranks.run(peek_alone, world_size=2) == [[0, 2], None]


def trains_alone(shard_iterable):
    fabric = launched()
    data = Indices(8) if shard_iterable else Numbers(2)
    ready = fabric.setup_dataloaders(DataLoader(data, batch_size=2), shard_iterable=shard_iterable)
    try:
        if fabric.global_rank == 0:
            rows(ready)
        fabric.barrier("end")
    except CollectiveMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shard_iterable", [True, False])
def test_one_rank_that_trains_by_itself_is_told_instead_of_waiting(ranks, shard_iterable):
    first, second = ranks.run(trains_alone, shard_iterable, world_size=2)
    assert first == second
    assert "barrier('end')" in first
    assert "loader" in first


# splitting by worker


class Documented(IterableDataset):
    """As in torch's documentation: splits itself by worker."""

    def __init__(self, start, end):
        self.start, self.end = start, end

    def __iter__(self):
        info = get_worker_info()
        if info is None:
            return iter(range(self.start, self.end))
        each = -(-(self.end - self.start) // info.num_workers)
        start = self.start + info.id * each
        return iter(range(start, min(start + each, self.end)))


def split_in_worker(worker_id):
    info = get_worker_info()
    dataset = info.dataset
    each = -(-(dataset.end - dataset.start) // info.num_workers)
    dataset.start = dataset.start + worker_id * each
    dataset.end = min(dataset.start + each, dataset.end)


class Bounded(Documented):
    def __iter__(self):
        return iter(range(self.start, self.end))


def documented(workers):
    fabric = launched()
    ready = fabric.setup_dataloaders(DataLoader(Documented(0, 24), batch_size=2, **in_workers(workers)))
    return rows(ready)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stream_that_splits_itself_by_worker_is_read_whole(ranks, workers):
    first, second = ranks.run(documented, workers, world_size=2)
    assert first == [[0, 2], [4, 6], [8, 10], [12, 14], [16, 18], [20, 22]]
    assert second == [[1, 3], [5, 7], [9, 11], [13, 15], [17, 19], [21, 23]]


def split_by_function(shard_iterable):
    fabric = launched()
    loader = DataLoader(Bounded(0, 12), batch_size=2, worker_init_fn=split_in_worker, **in_workers(2))
    ready = fabric.setup_dataloaders(loader, shard_iterable=shard_iterable)
    try:
        return rows(ready)
    except ConfigurationError as error:
        return str(error)


def test_a_worker_init_fn_that_splits_the_stream(ranks):
    first, second = ranks.run(split_by_function, True, world_size=2)
    for text in (first, second):
        assert "worker_init_fn has set Bounded." in text
        assert "write setup_dataloaders(loader, shard_iterable=False)" in text
    parts = [[0, 1], [6, 7], [2, 3], [8, 9], [4, 5], [10, 11]]
    assert ranks.run(split_by_function, False, world_size=2) == [parts] * 2


# orders of the user's own


def own_generator(kind):
    fabric = launched()
    make = {
        "torch": lambda: torch.Generator().manual_seed(3),
        "python": lambda: random.Random(3),
        "numpy": lambda: numpy.random.default_rng(3),
        "legacy": lambda: numpy.random.RandomState(3),
    }[kind]

    def loader():
        return fabric.setup_dataloaders(DataLoader(Indices(12), 2, sampler=Shuffled(12, make())))

    whole = loader()
    epochs = [rows(whole), rows(whole), rows(whole)]
    first = loader()
    list(first)
    batches = iter(first)
    seen = [next(batches).tolist()]
    path = f"{kind}.pt"
    fabric.save(path, {"loader": first})
    again = loader()
    fabric.load(path, {"loader": again})
    return [seen + rows(again), rows(again)] == epochs[1:]


@pytest.mark.parametrize("kind", ["torch", "python", "numpy", "legacy"])
def test_samplers_with_generators_of_their_own_go_on(ranks, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ranks.run(own_generator, kind, world_size=2) == [True, True]


class Hidden(Shuffled):
    """Its generator cannot be found."""

    def __init__(self, n):
        self.n, self.shuffle = n, random.Random(4).shuffle

    def __iter__(self):
        order = list(range(self.n))
        self.shuffle(order)
        return iter(order)


def hidden():
    fabric = launched()
    first = fabric.setup_dataloaders(DataLoader(Indices(12), 2, sampler=Hidden(12)))
    list(first)
    next(iter(first))
    state = first.state_dict()
    again = fabric.setup_dataloaders(DataLoader(Indices(12), 2, sampler=Hidden(12)))
    again.load_state_dict(state)
    with pytest.raises(UsageError) as caught:
        rows(again)
    shuffled = fabric.setup_dataloaders(DataLoader(Indices(12), 2, shuffle=True))
    next(iter(shuffled))
    ordered = fabric.setup_dataloaders(DataLoader(Indices(12), 2))
    ordered.load_state_dict(shuffled.state_dict())
    with pytest.raises(UsageError) as other:
        rows(ordered)
    return str(caught.value), str(other.value)


def test_an_order_that_cannot_be_found_again_is_refused(ranks):
    (text, other), same = ranks.run(hidden, world_size=2)
    assert (text, other) == same
    assert text.startswith(
        "Hidden has another order than when the position was saved: the epoch now begins with ["
    )
    assert "If it counts epochs itself, give it a method set_epoch(epoch), which Fabric calls." in text
    assert "that is its attribute" in text
    assert other.startswith("SequentialSampler has another order than when the position was saved")


def users_epochs(flag):
    fabric = launched()
    sampler = DistributedSampler(Indices(12), fabric.world_size, fabric.global_rank, seed=1)
    loader = DataLoader(Indices(12), 2, sampler=sampler)
    ready = fabric.setup_dataloaders(loader, use_distributed_sampler=flag)
    seen = []
    for epoch in (5, 6):
        sampler.set_epoch(epoch)
        seen.append(rows(ready))
    seen.append(rows(ready))
    expected = []
    for epoch in (5, 6, 7):
        sampler.set_epoch(epoch)
        expected.append(rows(loader))
    return seen == expected, ready.state_dict()["epoch"]


@pytest.mark.parametrize("flag", [True, False])
def test_epochs_that_the_user_tells_the_sampler_are_kept(ranks, flag):
    assert ranks.run(users_epochs, flag, world_size=2) == [(True, 8)] * 2


def resumed_in_step():
    fabric = launched()
    count = [3, 5][fabric.global_rank]

    def loader():
        raw = DataLoader(Indices(count), batch_size=1)
        return fabric.setup_dataloaders(raw, use_distributed_sampler=False, uneven="drop")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = loader()
        next(iter(first))
        again = loader()
        again.load_state_dict(first.state_dict())
        return rows(again)


def test_ranks_that_stop_together_do_so_after_a_resume(ranks):
    assert ranks.run(resumed_in_step, world_size=2) == [[[1], [2]]] * 2
