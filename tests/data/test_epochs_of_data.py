"""Which epoch an iteration is: counted by the loader, or said by the loop, in any usual spelling."""

from __future__ import annotations

import pytest
import torch
from data_cases import launched
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler


class Told(Dataset):
    """A map-style dataset, or a sampler, that has an order for each epoch it is told."""

    def __init__(self, n):
        self.n, self.epoch = n, 0

    def __len__(self):
        return self.n

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class ToldStream(Told, IterableDataset):
    """The same, as an iterable dataset."""


class ToldBatches(Told):
    """The same, as a batch sampler."""

    def __iter__(self):
        return iter(torch.tensor([*super().__iter__()]).reshape(-1, 2).tolist())

    def __len__(self):
        return self.n // 2


def by_loader(loader, epoch):
    loader.set_epoch(epoch)


def by_sampler(loader, epoch):
    loader.sampler.set_epoch(epoch)


def by_batch_sampler(loader, epoch):
    loader.batch_sampler.set_epoch(epoch)


def by_inner_sampler(loader, epoch):
    loader.batch_sampler.sampler.set_epoch(epoch)


def by_dataset(loader, epoch):
    loader.dataset.set_epoch(epoch)


SPELLINGS = {
    "shuffle": (lambda world, rank: DataLoader(range(8), 2, shuffle=True), [by_loader, by_sampler]),
    "inner": (
        lambda world, rank: DataLoader(range(8), 2, shuffle=True),
        [by_batch_sampler, by_inner_sampler],
    ),
    "sampler": (
        lambda world, rank: DataLoader(range(8), 2, sampler=Told(8)),
        [by_loader, by_sampler, by_batch_sampler, by_inner_sampler],
    ),
    "batches": (
        lambda world, rank: DataLoader(range(8), batch_sampler=ToldBatches(8)),
        [by_loader, by_batch_sampler],
    ),
    "distributed": (
        lambda world, rank: DataLoader(range(8), 2, sampler=DistributedSampler(range(8), world, rank)),
        [by_loader, by_sampler, by_batch_sampler, by_inner_sampler],
    ),
    "stream": (lambda world, rank: DataLoader(ToldStream(8), 2), [by_loader, by_dataset]),
    "single items": (lambda world, rank: DataLoader(range(8), None, shuffle=True), [by_loader, by_sampler]),
}


def by_epochs(kind, others):
    """Whether epochs 1, 0, 0 and 2, chosen by each spelling in new loaders, are those of an unbroken run."""
    fabric = launched()
    make, spellings = SPELLINGS[kind]

    def loader():
        return fabric.setup_dataloaders(make(fabric.world_size, fabric.global_rank))

    def epoch_of(ready):
        return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in ready]

    for _ in range(others):
        loader()
    unbroken = loader()
    epochs = [epoch_of(unbroken) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    found = {}
    for spelling in spellings:
        again, seen = loader(), []
        for epoch in (1, 0, 2, 2) if spelling in (by_loader, by_sampler) and kind == "shuffle" else (1, 0, 2):
            spelling(again, epoch)
            seen.append(epoch_of(again) == epochs[epoch])
        found[spelling.__name__] = seen
    return found, epochs


@pytest.mark.parametrize("kind", SPELLINGS)
def test_epochs_are_those_that_the_loop_says_in_any_usual_spelling(ranks, kind):
    for world in (1, 2):
        for found, _ in ranks.run(by_epochs, kind, 0, world_size=world):
            assert all([all(seen) for seen in found.values()]), (world, found)


@pytest.mark.parametrize("kind", ["shuffle", "stream"])
def test_the_order_does_not_depend_on_loaders_that_were_set_up_before(ranks, kind):
    orders = [ranks.run(by_epochs, kind, others, world_size=2) for others in (0, 2)]
    assert orders[0] == orders[1]


def given_objects(kind):
    """As hand-written loops do: the user's own sampler or dataset is told, from epoch 1 on."""
    fabric = launched()
    rank, world = fabric.global_rank, fabric.world_size
    part = {
        "distributed": lambda: DistributedSampler(range(8), world, rank),
        "sampler": lambda: Told(8),
        "stream": lambda: ToldStream(8),
    }[kind]

    def epochs(first, tells):
        mine = part()
        loader = DataLoader(mine, 2) if kind == "stream" else DataLoader(range(8), 2, sampler=mine)
        if tells == "before":
            mine.set_epoch(first)
        ready = fabric.setup_dataloaders(loader)
        seen = []
        for epoch in range(first, 3):
            if tells == "each":
                mine.set_epoch(epoch)
            seen.append([batch.tolist() for batch in ready])
        return seen

    whole = epochs(0, "never")
    return [epochs(1, tells) == whole[1:] for tells in ("each", "before")] + [epochs(0, "each") == whole]


@pytest.mark.parametrize("kind", ["distributed", "sampler", "stream"])
def test_epochs_that_the_users_own_objects_are_told_are_followed(ranks, kind):
    for world in (1, 2):
        assert ranks.run(given_objects, kind, world_size=world) == [[True] * 3] * world


def lightning_guard():
    fabric = launched()
    ready = fabric.setup_dataloaders(DataLoader(range(8), 2, shuffle=True))
    return hasattr(ready.sampler, "set_epoch"), isinstance(ready.sampler, RandomSampler), len(ready.sampler)


def test_guards_that_ask_a_sampler_for_set_epoch_find_it(ranks):
    assert ranks.run(lightning_guard, world_size=2) == [(True, True, 8)] * 2
