"""Iterable datasets on real ranks: each sample once; equal numbers of steps where ranks train together."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
from data_cases import Indices, Numbers, in_workers, launched, rows
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fabric.core.errors import ConfigurationError
from fabric.strategies import ModelParallelStrategy


class Sized(Numbers):
    def __init__(self, n, shuffle=False):
        super().__init__(n)
        self.shuffle = shuffle

    def __iter__(self):
        items = list(range(self.n))
        if self.shuffle:  # by the global stream, of which every rank and worker has another
            random.shuffle(items)
        return iter(items)

    def __len__(self):
        return self.n


class Ranked(Numbers):
    """Shares itself out; rank r has `lengths[r]` numbers."""

    world_size = 0

    def __init__(self, lengths, rank):
        super().__init__(lengths[rank])
        self.rank = rank


class Part(IterableDataset):
    """The same, and nothing about it says so."""

    def __init__(self, lengths, rank):
        self.n = lengths[rank]

    def __iter__(self):
        return iter(range(self.n))


# each sample once


def streamed(n, batch, workers, shuffle, uneven=None):
    fabric = launched()
    loader = DataLoader(Sized(n, shuffle), batch, **in_workers(workers))
    ready = fabric.setup_dataloaders(loader, uneven=uneven)
    with torch.no_grad():
        return [(len(ready), rows(ready)) for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_sample_once_and_equal_steps(ranks, workers, shuffle, world):
    for n, batch in ((8, 2), (11, 2), (7, 3), (1, 2)):
        per_rank = ranks.run(streamed, n, batch, workers, shuffle, world_size=world)
        for epoch in range(2):
            batches = [mine[epoch][1] for mine in per_rank]
            assert sorted(x for mine in batches for part in mine for x in part) == list(range(n))
            assert [len(mine) for mine in batches] == [mine[epoch][0] for mine in per_rank], "len() is wrong"
            assert n < world or len({len(mine) for mine in batches}) == 1
            assert all(len(part) <= batch + 1 for mine in batches for part in mine)


def global_batches(per_rank):
    return [
        sorted(x for part in step for x in part)
        for step in zip(*[mine[0][1] for mine in per_rank], strict=True)
    ]


def test_global_batches_are_the_same_on_any_number_of_ranks_and_workers(ranks):
    for shuffle in (False, True):
        alone = global_batches(ranks.run(streamed, 24, 4, 0, shuffle, world_size=1))
        assert len(alone) == 6
        for world, workers in ((1, 2), (2, 0), (2, 1), (2, 2), (4, 0), (4, 2)):
            found = global_batches(ranks.run(streamed, 24, 4 // world, workers, shuffle, world_size=world))
            assert found == alone, (world, workers)


@pytest.mark.parametrize(
    ("uneven", "expected"),
    [
        ("pad", [[0, 2], [4, 6], [8, 10], [12]]),
        ("drop", [[0, 2], [4, 6], [8, 10]]),
        ("exact", [[0, 2], [4, 6], [8, 10, 12]]),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_over(ranks, uneven, expected, workers):
    first, second = ranks.run(streamed, 13, 2, workers, False, uneven, world_size=2)
    assert [epoch[1] for epoch in first] == [expected] * 2
    assert [epoch[0] for epoch in first] == [len(expected)] * 2
    assert len(second[0][1]) == (3 if uneven != "pad" else 4)


def refused_stream(workers):
    fabric = launched()
    ready = fabric.setup_dataloaders(DataLoader(Numbers(13), 2, **in_workers(workers)), uneven="error")
    with pytest.raises(
        ConfigurationError, match='uneven="error": the data do not divide by 2 ranks, 1 are'
    ) as caught:
        rows(ready)
    return type(caught.value).__name__


@pytest.mark.parametrize("workers", [0, 1])
def test_left_over_samples_are_an_error_on_all_ranks(ranks, workers):
    assert ranks.run(refused_stream, workers, world_size=2) == ["ConfigurationError"] * 2


def single_items(train):
    fabric = launched()
    ready = fabric.setup_dataloaders(DataLoader(Numbers(7), batch_size=None))
    with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(train):
        warnings.simplefilter("always")
        seen = rows(ready)
        fabric.barrier()
    return seen, [str(warning.message) for warning in caught]


def test_whole_batches_of_a_stream_end_together_in_training_and_are_all_seen_in_evaluation(ranks):
    (first, told), (second, quiet) = ranks.run(single_items, True, world_size=2)
    assert (first, second, quiet) == ([0, 2, 4], [1, 3, 5], [])
    assert "Some ranks get no batch in the last round" in told[0]
    (first, told), (second, _) = ranks.run(single_items, False, world_size=2)
    assert (first, second, told) == ([0, 2, 4, 6], [1, 3, 5], [])


def opted_out(use):
    fabric = launched()
    if use == "flag":
        data, options = Numbers(4), {"shard_iterable": False, "uneven": "exact"}
    elif use == "attributes":
        data, options = Ranked([4, 4], fabric.global_rank), {}
    else:
        data, options = Numbers(4), {"use_distributed_sampler": False}
    ready = fabric.setup_dataloaders(DataLoader(data, 2, **in_workers(1)), **options)
    return rows(ready), ready.dataset is data


@pytest.mark.parametrize("use", ["flag", "attributes", "no sampler"])
def test_datasets_that_share_themselves_out_are_left_alone(ranks, use):
    assert ranks.run(opted_out, use, world_size=2) == [([[0, 1], [2, 3]], True)] * 2


def by_data_rank():
    strategy = ModelParallelStrategy(lambda model, mesh: model, data_parallel_size=2, tensor_parallel_size=2)
    fabric = launched(strategy)
    ready = fabric.setup_dataloaders(DataLoader(Numbers(8), 2))
    return rows(ready)


def test_ranks_that_hold_parts_of_one_model_see_the_same_samples(ranks):
    first, second = [[0, 2], [4, 6]], [[1, 3], [5, 7]]
    assert ranks.run(by_data_rank, world_size=4) == [first, first, second, second]


# streams of different lengths


def lengths(kind, uneven, train, workers=0):
    """Steps that each rank takes, what it was told, and a sum over ranks afterwards."""
    fabric = launched()
    rank, counts = fabric.global_rank, [3, 4, 2][: fabric.world_size]
    options = {"uneven": uneven}
    if kind == "stream":
        loader, options = (
            DataLoader(Part(counts, rank), 1, **in_workers(workers)),
            {**options, "shard_iterable": False},
        )
    elif kind == "ranked":
        loader = DataLoader(Ranked(counts, rank), 1)
    elif kind == "sampler":
        loader = DataLoader(Indices(counts[rank]), sampler=DistributedSampler(Indices(counts[rank]), 1, 0))
    else:
        loader, options = DataLoader(Indices(counts[rank])), {**options, "use_distributed_sampler": False}
    ready = fabric.setup_dataloaders(loader, **options)
    model = fabric.setup(torch.nn.Linear(1, 1))
    steps = 0
    with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(train):
        warnings.simplefilter("always")
        for batch in ready:
            loss = model(batch.float().reshape(1, 1)).sum()
            if train:
                fabric.backward(loss)
            steps += 1
    told = [str(w.message) for w in caught if "different lengths" in str(w.message)]
    return steps, told, float(fabric.all_reduce(float(steps), reduce_op="sum")), ready.state_dict()["epoch"]


@pytest.mark.parametrize(
    ("kind", "uneven", "workers"),
    [
        ("stream", None, 0),
        ("stream", None, 1),
        ("stream", "drop", 0),
        ("ranked", None, 0),
        ("sampler", None, 0),
        ("own", "drop", 0),
    ],
)
def test_training_stops_together(ranks, kind, uneven, workers):
    results = ranks.run(lengths, kind, uneven, True, workers, world_size=3)
    assert [(steps, total, epoch) for steps, _, total, epoch in results] == [(2, 6.0, 1)] * 3
    (text,) = results[0][1]
    assert "The ranks' data are of different lengths:\n  rank 0: " in text
    assert "all ranks stop when the first has no batch left" in text
    assert results[1][1] == results[2][1] == []


@pytest.mark.parametrize("kind", ["stream", "ranked", "sampler", "own"])
def test_evaluation_sees_all_that_each_rank_has(ranks, kind):
    results = ranks.run(lengths, kind, None, False, world_size=3)
    assert [(steps, told, total) for steps, told, total, _ in results] == [(n, [], 9.0) for n in (3, 4, 2)]


def refused(kind):
    try:
        lengths(kind, "error", True)
    except ConfigurationError as error:
        fabric = launched()
        return str(error), float(fabric.all_reduce(1.0, reduce_op="sum"))
    return None


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("stream", ["more than 2 batches", "more than 2 batches", "2 batches"]),
        ("sampler", ["3 batches", "4 batches", "2 batches"]),
        ("own", ["3 batches", "4 batches", "2 batches"]),
    ],
)
def test_different_lengths_are_an_error_on_all_ranks(ranks, kind, table):
    results = ranks.run(refused, kind, world_size=3)
    assert len(set(results)) == 1
    text, total = results[0]
    assert total == 3.0
    assert text.startswith("The ranks' data are of different lengths:\n")
    assert [line.strip() for line in text.splitlines()[1:4]] == [
        f"rank {r}: {row}" for r, row in enumerate(table)
    ]
    assert 'write uneven="drop" to stop all ranks when the first has no batch left' in text


def padded():
    fabric = launched()
    with pytest.raises(ConfigurationError) as caught:
        fabric.setup_dataloaders(DataLoader(Numbers(4)), shard_iterable=False, uneven="pad")
    return str(caught.value)


def test_only_what_fabric_deals_out_can_be_padded(ranks):
    first, second = ranks.run(padded, world_size=2)
    assert first == second
    assert first.startswith('uneven="pad" repeats samples, but DataLoader shards its data itself.')


def endless():
    fabric = launched()

    class Endless(IterableDataset):
        def __iter__(self):
            return itertools.count()

    ready = fabric.setup_dataloaders(DataLoader(Endless(), 2))
    return [batch.tolist() for batch in itertools.islice(ready, 3)], ready.state_dict()["streams"][0][
        "samples"
    ]


def test_an_endless_stream_is_dealt_out_as_it_comes(ranks):
    assert ranks.run(endless, world_size=2) == [
        ([[0, 2], [4, 6], [8, 10]], 12),
        ([[1, 3], [5, 7], [9, 11]], 12),
    ]
