"""`setup_dataloaders` on several real ranks."""

from __future__ import annotations

import gc
import os
import random
import warnings
from datetime import timedelta

import numpy
import pytest
import torch
import torch.distributed as dist
from data_cases import Indices, Numbers, launched, rows
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchmetrics.classification import MulticlassAccuracy

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.utilities.warnings import RanksDifferWarning


class Buckets:
    """A batch sampler with required arguments, shuffled by Python's generator."""

    def __init__(self, n, size):
        self.n = n
        self.size = size

    def __iter__(self):
        chunks = [list(range(i, min(i + self.size, self.n))) for i in range(0, self.n, self.size)]
        random.shuffle(chunks)
        return iter(chunks)

    def __len__(self):
        return (self.n + self.size - 1) // self.size


class Draws(Indices):
    def __getitem__(self, index):
        numbers = random.random(), float(numpy.random.rand()), float(torch.rand((), dtype=torch.float64))
        return torch.tensor(numbers, dtype=torch.float64)


def flat(per_rank):
    return sorted(index for batches in per_rank for batch in batches for index in batch)


# what ranks see


def read_evaluation(n, size):
    fabric = launched()
    loader = fabric.setup_dataloaders(DataLoader(Indices(n), batch_size=size))
    batches = rows(loader)
    assert len(loader) == len(batches)
    return batches


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_counts_every_sample_once(ranks, world):
    for n, size in [(21, 4), (4, 2), (9, 2), (2, 4), (13, 1)]:
        per_rank = ranks.run(read_evaluation, n, size, world_size=world)
        assert flat(per_rank) == list(range(n))
        if n >= world:
            assert len({len(batches) for batches in per_rank}) == 1


def accuracy(n, size, kind):
    fabric = launched()
    metric = MulticlassAccuracy(num_classes=3, average="macro")
    data = Indices(n) if kind == "map" else Numbers(n)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=size))
    with torch.no_grad():
        for batch in loader:
            metric.update(batch * 7 % 3, batch * 5 % 4 % 3)
    return fabric.compute_metrics(metric).item()


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("world", [2, 3])
def test_accuracy_is_that_of_one_process_bit_for_bit(ranks, world, kind):
    for n, size in [(21, 4), (9, 2), (13, 1), (1, 2)]:
        (alone,) = ranks.run(accuracy, n, size, kind, world_size=1)
        assert ranks.run(accuracy, n, size, kind, world_size=world) == [alone] * world


def read_training(seed):
    """Three epochs, the second one broken off."""
    fabric = launched()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FABRIC_GLOBAL_SEED", str(seed))
        loader = fabric.setup_dataloaders(DataLoader(Indices(24), batch_size=3, shuffle=True))
    torch.manual_seed(fabric.global_rank)  # the ranks' own streams differ from here on
    random.seed(fabric.global_rank)
    first = rows(loader)
    for _ in loader:
        break
    return first, rows(loader), torch.rand(1).item(), random.random()


def read_undisturbed():
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    return torch.rand(1).item(), random.random()


def test_training_orders_are_new_each_epoch_equal_in_each_run_and_disjoint(ranks):
    runs = [ranks.run(read_training, 1, world_size=2) for _ in range(2)]
    assert runs[0] == runs[1]
    (first, third, *own), (other_first, other_third, *other_own) = runs[0]
    assert first != third
    assert flat([first, other_first]) == flat([third, other_third]) == list(range(24))
    assert [tuple(own), tuple(other_own)] == ranks.run(read_undisturbed, world_size=2), (
        "the loop's own stream moved"
    )
    (reseeded, *_), _ = ranks.run(read_training, 2, world_size=2)
    assert reseeded != first


def read_with_samplers():
    fabric = launched()
    made = [
        DataLoader(Indices(20), sampler=WeightedRandomSampler([1.0] * 20, 20), batch_size=2),
        DataLoader(Indices(20), batch_sampler=Buckets(20, 2)),
        DataLoader(Indices(6), batch_size=None, sampler=WeightedRandomSampler([1.0] * 6, 6)),
    ]
    return [rows(loader) for loader in fabric.setup_dataloaders(*made)]


def test_samplers_of_all_kinds_deal_out_what_one_rank_would_see(ranks):
    one = ranks.run(read_with_samplers, world_size=1)[0]
    two = ranks.run(read_with_samplers, world_size=2)
    weighted = [pair for step in zip(two[0][0], two[1][0], strict=True) for pair in zip(*step, strict=True)]
    assert [i for pair in weighted for i in pair] == [i for batch in one[0] for i in batch]
    assert two[0][1] == one[1][0::2]
    assert two[1][1] == one[1][1::2]
    assert two[0][2] + two[1][2] == one[2][0::2] + one[2][1::2]


# what is left to the user


def read_without_sharding():
    fabric = launched()
    plain = fabric.setup_dataloaders(DataLoader(Indices(6), batch_size=2), use_distributed_sampler=False)
    sampler = DistributedSampler(Indices(8), shuffle=True, seed=3)
    own = DataLoader(Indices(8), sampler=sampler, batch_size=2)
    ready = fabric.setup_dataloaders(own)
    epochs = [rows(ready), rows(ready)]
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected.append(rows(own))
    return rows(plain), epochs, expected


def test_loaders_that_the_user_shards_keep_their_order(ranks):
    for plain, epochs, expected in ranks.run(read_without_sharding, world_size=2):
        assert plain == [[0, 1], [2, 3], [4, 5]]
        assert epochs == expected
        assert epochs[0] != epochs[1], "the sampler was not told the epoch"


class Pipe(Numbers, torch.utils.data.IterDataPipe):
    """A stream of which nobody knows whether it shares itself out."""


def read_pipe():
    fabric = launched()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ready = fabric.setup_dataloaders(DataLoader(Pipe(), batch_size=2))
        fabric.setup_dataloaders(DataLoader(Pipe(), batch_size=2), shard_iterable=False)
        fabric.setup_dataloaders(DataLoader(Pipe(), batch_size=2), use_distributed_sampler=False)
    kinds = [warning.category for warning in caught]
    return rows(ready), kinds, [str(warning.message) for warning in caught]


def test_a_pipe_seen_in_full_is_warned_of_once_and_on_rank_zero(ranks):
    first, second = ranks.run(read_pipe, world_size=2)
    assert first[0] == second[0] == [[0, 1], [2, 3]]
    assert first[1] == [RanksDifferWarning]
    assert first[2][0].startswith("Each of the 2 ranks will read all of")
    assert "shard_iterable=False" in first[2][0]
    assert second[1] == []


# workers


def draw_in_workers():
    fabric = launched()
    workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(Draws(8), batch_size=2, shuffle=True, **workers)
    ready = fabric.setup_dataloaders(loader)
    drawn = [rows(ready) for _ in range(2)]
    del ready
    return drawn


def test_workers_draw_apart_on_all_ranks_and_alike_in_each_run(ranks):
    runs = [ranks.run(draw_in_workers, world_size=2) for _ in range(2)]
    assert runs[0] == runs[1]
    numbers = torch.tensor(runs[0], dtype=torch.float64).flatten().tolist()
    assert len(set(numbers)) == len(numbers) == 2 * 2 * 4 * 3


class Collecting(Indices):
    """Collects garbage in the worker, as Python does from time to time."""

    def __getitem__(self, index):
        gc.collect()
        return index + 100 * gc.isenabled()


def garbage(enabled):
    """A process group that is garbage when the workers are forked."""
    fabric = launched()
    store = dist.PrefixStore("other", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroupGloo(store, fabric.global_rank, fabric.world_size, timedelta(seconds=60))
    group.allreduce([torch.ones(1)]).wait()
    loader = DataLoader(Collecting(4), num_workers=1, multiprocessing_context="fork", timeout=30)
    ready = fabric.setup_dataloaders(loader)
    gc.disable()
    ring = [group]
    ring.append(ring)
    del ring, group
    if enabled:
        gc.set_threshold(10**6)
        gc.enable()
    seen = rows(ready)
    as_it_was = gc.isenabled() == enabled
    gc.enable()
    gc.set_threshold(700, 10, 10)
    return seen, as_it_was


@pytest.mark.parametrize("enabled", [True, False])
def test_workers_leave_the_loops_garbage_alone(ranks, enabled):
    more = 100 * enabled
    expected = [([[0 + more], [2 + more]], True), ([[1 + more], [3 + more]], True)]
    assert ranks.run(garbage, enabled, world_size=2) == expected


# bad input


def refused():
    fabric = launched()
    loader = DataLoader(Indices(5), batch_size=2)
    ready = fabric.setup_dataloaders(loader)
    found = []
    for arguments, keywords in [
        ((ready,), {}),
        (([1, 2],), {}),
        ((), {}),
        ((loader,), {"uneven": "some"}),
        ((loader,), {"uneven": "error"}),
    ]:
        try:
            fabric.setup_dataloaders(*arguments, **keywords)
        except (ConfigurationError, ArgumentTypeError) as error:
            found.append((isinstance(error, TypeError), str(error)))
    return found


def test_bad_loaders_are_refused_on_all_ranks(ranks):
    first, second = ranks.run(refused, world_size=2)
    assert first == second
    again, no_loader, none, unknown, uneven = first
    assert not again[0]
    assert "this DataLoader is set up already" in again[1]
    assert no_loader[0]
    assert "needs torch's DataLoader, but got list" in no_loader[1]
    assert not none[0]
    assert unknown[1] == "uneven='some' is unknown. Write one of 'pad', 'exact', 'drop', 'error'."
    assert uneven[1].startswith('uneven="error": the data do not divide by 2 ranks, 1 are left over.')


def shuffled_under_seeds_of_their_own() -> list[int]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    os.environ["FABRIC_GLOBAL_SEED"] = str(fabric.global_rank)  # what seed_everything(rank) leaves
    try:
        loader = fabric.setup_dataloaders(DataLoader(range(8), shuffle=True))
    finally:
        del os.environ["FABRIC_GLOBAL_SEED"]
    return [int(x) for x in loader]


def test_ranks_with_seeds_of_their_own_still_share_one_order(ranks):
    first, second = ranks.run(shuffled_under_seeds_of_their_own, world_size=2)
    assert sorted(first + second) == list(range(8))
