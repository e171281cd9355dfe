"""The random streams of a set-up loader: the loop's own stay untouched, workers get theirs."""

from __future__ import annotations

import pickle
import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from fabric.data.proxies import SeedWorker
from fabric.data.rules import Shard
from fabric.data.sharding import shard_loader
from fabric.wrappers import _FabricDataLoader


class Indices(Dataset):
    """Gives the index that it is asked for."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


class Bucketed:
    """A batch sampler with required arguments, of no base class, shuffled by Python's generator."""

    def __init__(self, lengths, size):
        self.lengths = lengths
        self.size = size
        self.told = []

    def __iter__(self):
        ranked = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        chunks = [ranked[i : i + self.size] for i in range(0, len(ranked), self.size)]
        random.shuffle(chunks)
        return iter(chunks)

    def __len__(self):
        return (len(self.lengths) + self.size - 1) // self.size

    def set_epoch(self, epoch):
        self.told.append(epoch)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def shard(loader, rank=0, world=2, seed=0, uneven=None):
    source = shard_loader(loader, Shard(rank, world), seed, uneven)
    return _FabricDataLoader(source.loader, user_loader=loader, adapter=source)


def read(loader):
    """The batches of one epoch as lists."""
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def flat(per_rank):
    return sorted(index for batches in per_rank for batch in batches for index in batch)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Indices(9), batch_size=2),
        lambda: DataLoader(Indices(9), batch_size=2, shuffle=True),
        lambda: DataLoader(Indices(9), batch_sampler=Bucketed(list(range(9)), 2)),
        lambda: DataLoader(Indices(9), batch_size=None, shuffle=True),
        lambda: DataLoader(Stream(), batch_size=2),
        lambda: DataLoader(Indices(9), batch_size=2, sampler=DistributedSampler(Indices(9), 1, 0)),
    ],
    ids=["order", "shuffle", "batches", "items", "iterable", "distributed"],
)
def test_iterating_leaves_the_loops_own_streams_untouched(make):
    loader = shard(make(), 0, 1)
    states = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state()
    for _ in range(2):
        for _ in loader:
            break
        read(loader)
    assert random.getstate() == states[0]
    assert str(numpy.random.get_state()) == states[1]
    assert torch.get_rng_state().equal(states[2])


def test_a_generator_of_the_users_own_decides_the_order():
    def loader(seed):
        return DataLoader(
            Indices(32), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )

    raw = loader(5)
    ours = shard(loader(5), 0, 1, seed=1)
    assert [read(ours), read(ours)] == [read(raw), read(raw)]
    assert read(shard(loader(6), 0, 1, seed=1)) != read(shard(loader(5), 0, 1, seed=1))


# workers


class Draws(Dataset):
    """What each library draws in a worker, and what the user's worker_init_fn left there."""

    mark = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        numbers = random.random(), float(numpy.random.rand()), float(torch.rand((), dtype=torch.float64))
        return torch.tensor(numbers, dtype=torch.float64)


def mark_worker(worker_id):
    torch.utils.data.get_worker_info().dataset.mark = worker_id


class Marks(Draws):
    def __getitem__(self, index):
        return self.mark


def drawn(rank, epochs=2, seed=3, **kwargs):
    loader = shard(DataLoader(Draws(), batch_size=2, num_workers=2, **kwargs), rank, seed=seed)
    return [[batch.tolist() for batch in loader] for _ in range(epochs)]


def numbers(nested):
    return [float(number) for number in torch.tensor(nested, dtype=torch.float64).flatten()]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_draw_apart_by_rank_worker_epoch_and_library_and_alike_in_each_run(persistent):
    torch.manual_seed(0)
    runs = [drawn(rank, persistent_workers=persistent) for rank in (0, 1)]
    everything = numbers(runs)
    assert len(everything) == 2 * 2 * 4 * 3
    assert len(set(everything)) == len(everything)
    torch.manual_seed(1)  # the loop's own stream has no part in it
    assert [drawn(rank, persistent_workers=persistent) for rank in (0, 1)] == runs
    assert not set(numbers(drawn(0, seed=4))) & set(everything)


def test_workers_draws_of_an_epoch_do_not_depend_on_the_epochs_before():
    loader = shard(DataLoader(Draws(), batch_size=2, num_workers=2), seed=3)
    loader.set_epoch(1)
    assert [batch.tolist() for batch in loader] == drawn(0)[1]


def test_the_seed_that_torch_draws_for_workers_is_a_function_of_the_epoch():
    loader, seeds = shard(DataLoader(Draws(), batch_size=2)), []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        iter(loader)
        seeds.append(loader._dataloader.generator.initial_seed())
    assert seeds[0] == seeds[2] != seeds[1]
    twin = pickle.loads(pickle.dumps(loader))
    assert twin._adapter.seed_generator is twin._dataloader.generator


def test_the_users_worker_init_fn_is_still_called():
    loader = shard(DataLoader(Marks(), batch_size=2, num_workers=2, worker_init_fn=mark_worker), world=1)
    assert read(loader) == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_persistent_workers_over_two_epochs():
    def loader(rank):
        made = DataLoader(Indices(12), batch_size=2, shuffle=True, num_workers=2, persistent_workers=True)
        return shard(made, rank)

    ranks = [loader(0), loader(1)]
    epochs = [[read(rank) for rank in ranks] for _ in range(2)]
    assert [flat(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]
    plain = [shard(DataLoader(Indices(12), batch_size=2, shuffle=True), rank) for rank in (0, 1)]
    assert [[read(rank) for rank in plain] for _ in range(2)] == epochs


def own(loader, rank):
    source = shard_loader(loader, Shard(rank, 1), 3, None, use_distributed_sampler=False)
    return _FabricDataLoader(source.loader, user_loader=loader, adapter=source)


def test_a_loader_that_keeps_its_order_still_has_workers_seeded_apart():
    loader = DataLoader(Draws(), batch_size=2, num_workers=2)
    seen = [[batch.tolist() for batch in own(loader, rank)] for rank in (0, 1)]
    assert len(set(numbers(seen))) == 2 * 8 * 3


def test_a_default_device_that_refuses_generators_of_the_host_keeps_torchs_own_draw():
    with torch.device("meta"):
        source = shard_loader(DataLoader(Indices(4)), Shard(0, 1), 0, None, use_distributed_sampler=False)
        assert source.loader.generator is None


def test_sharded_loaders_and_worker_functions_pickle():
    loader = DataLoader(Indices(8), batch_size=2, shuffle=True, num_workers=1, worker_init_fn=mark_worker)
    sharded = shard_loader(loader, Shard(1, 2), 0, None).loader
    twin = pickle.loads(pickle.dumps(sharded))
    assert list(twin.batch_sampler) == list(sharded.batch_sampler)
    assert isinstance(twin.worker_init_fn, SeedWorker)
    assert twin.worker_init_fn.user_function is mark_worker


def test_spawned_workers_get_the_shard():
    loader = DataLoader(
        Indices(8), batch_size=2, num_workers=1, multiprocessing_context="spawn", worker_init_fn=mark_worker
    )
    assert read(shard(loader, 1)) == [[1, 3], [5, 7]]
