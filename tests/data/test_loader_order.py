"""The oracle is plain torch on one process: joined over ranks, our batches are its batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric

GLOBAL_BATCH = 8


def launched():
    world = dist.get_world_size()
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
    fabric.launch()
    return fabric


def read(n, shuffle, epochs=2, **kwargs):
    """This rank's batches, one list of indices per step."""
    fabric = launched()
    data = TensorDataset(torch.arange(n))
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // fabric.world_size, shuffle=shuffle, **kwargs)
    ready = fabric.setup_dataloaders(loader)
    return [[batch.tolist() for (batch,) in ready] for _ in range(epochs)]


def joined(per_rank):
    """Global batches, in the order in which the samples were dealt out."""
    return [[i for row in zip(*step, strict=True) for i in row] for step in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_in_order_joined_over_ranks_are_those_of_torch(ranks, workers):
    oracle = [
        batch.tolist() for (batch,) in DataLoader(TensorDataset(torch.arange(32)), batch_size=GLOBAL_BATCH)
    ]
    context = (
        "fork" if workers else None
    )  # a pool's ranks come from a fork server, and so would their workers
    for world in (1, 2, 4):
        per_rank = ranks.run(
            read, 32, False, num_workers=workers, multiprocessing_context=context, world_size=world
        )
        assert joined([epochs[0] for epochs in per_rank]) == oracle
        assert joined([epochs[1] for epochs in per_rank]) == oracle


class Endless(torch.utils.data.Sampler):
    """It has no length."""

    def __iter__(self):
        while True:
            yield from range(8)


class EndlessBatches(torch.utils.data.BatchSampler):
    """Of a sampler without a length."""


def first_of_endless(raw):
    fabric = launched()
    order = EndlessBatches(Endless(), 2, drop_last=False)
    loader = DataLoader(range(8), batch_sampler=order) if raw else DataLoader(range(8), 2, sampler=Endless())
    batches = iter(loader if raw else fabric.setup_dataloaders(loader))
    return [next(batches).tolist() for _ in range(5)]


@pytest.mark.parametrize("raw", [False, True])
def test_samplers_without_a_length_are_iterated(ranks, raw):
    per_rank = ranks.run(first_of_endless, raw, world_size=2)
    all_batches = [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
    each = [[0, 2], [4, 6], [0, 2], [4, 6], [0, 2]]
    assert per_rank == ([all_batches] * 2 if raw else [each, [[i + 1 for i in batch] for batch in each]])


def test_one_rank_sees_exactly_what_torch_gives(ranks):
    for n in (1, 7, 8, 21):
        oracle = [
            batch.tolist() for (batch,) in DataLoader(TensorDataset(torch.arange(n)), batch_size=GLOBAL_BATCH)
        ]
        assert ranks.run(read, n, False, world_size=1)[0] == [oracle, oracle]


def test_shuffled_global_batches_are_the_same_on_any_number_of_ranks(ranks):
    one, two, four = (ranks.run(read, 48, True, world_size=world) for world in (1, 2, 4))
    for epoch in range(2):
        batches = one[0][epoch]
        assert sorted(i for batch in batches for i in batch) == list(range(48))
        assert joined([epochs[epoch] for epochs in two]) == batches
        assert joined([epochs[epoch] for epochs in four]) == batches
    assert one[0][0] != one[0][1]


def test_dropped_last_batches_are_the_same_on_any_number_of_ranks(ranks):
    one, two, four = (ranks.run(read, 45, True, drop_last=True, world_size=world) for world in (1, 2, 4))
    assert len(one[0][0]) == 5
    for epoch in range(2):
        assert joined([epochs[epoch] for epochs in two]) == one[0][epoch]
        assert joined([epochs[epoch] for epochs in four]) == one[0][epoch]


def train():
    """Two epochs of a small regression in float64; final parameters."""
    fabric = launched()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.linspace(-1, 1, 96, dtype=torch.float64).reshape(32, 3)
    loader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)), GLOBAL_BATCH // fabric.world_size, shuffle=True
    )
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ready = fabric.setup_dataloaders(loader)
    for _ in range(2):
        for features, target in ready:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(features), target))
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_training_is_the_same_on_any_number_of_ranks(ranks):
    one, two, four = (ranks.run(train, world_size=world) for world in (1, 2, 4))
    for result in (*two, *four):
        torch.testing.assert_close(result, one[0], rtol=1e-12, atol=1e-12)
    untrained = torch.cat(
        [p.detach().flatten() for p in nn.Sequential(nn.Linear(3, 4)).double().parameters()]
    )
    assert not torch.equal(one[0][: untrained.numel()], untrained)
