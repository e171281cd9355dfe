"""Loaders whose padding an evaluation would count, and loaders that a thread reads ahead."""

from __future__ import annotations

import threading
import warnings
from queue import Queue

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

from fabric import Fabric


class OwnBatches(BatchSampler):
    """A batch sampler whose batches Fabric cannot split."""


def started() -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size() if dist.is_initialized() else 1)
    fabric.launch()
    return fabric


def loader_of(kind: str) -> DataLoader:
    data = TensorDataset(torch.arange(13.0)[:, None])
    if kind == "own batches":
        return DataLoader(data, batch_sampler=OwnBatches(RandomSampler(data), 3, False))
    if kind == "random subset":
        return DataLoader(data, 2, sampler=SubsetRandomSampler(range(7)))
    return DataLoader(data, 2, shuffle=kind != "in order", drop_last=kind == "drop_last")


def evaluate(kind: str, uneven: str | None = None, grad: bool = False, epochs: int = 2):
    fabric = started()
    loader = fabric.setup_dataloaders(loader_of(kind), uneven=uneven)
    with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(grad):
        warnings.simplefilter("always")
        rows = [len(fabric.all_gather(x, uneven="cat")) for _ in range(epochs) for (x,) in loader]
    return sum(rows) / epochs, [str(each.message) for each in caught if "twice" in str(each.message)]


@pytest.mark.parametrize("kind", ["shuffled", "random subset", "own batches"])
def test_an_evaluation_that_counts_padding_is_warned_of_once(ranks, kind):
    rows, texts = ranks.run(evaluate, kind, world_size=2)[0]
    repeated = {"shuffled": "1 of the 13 samples", "random subset": "1 of the 7 samples"}
    assert [text.split(", so")[0] for text in texts] == [
        f"The ranks got {repeated.get(kind, '1 of the 5 batches')} of this loader twice under torch.no_grad()"
    ]
    assert rows == {"shuffled": 14, "random subset": 8, "own batches": 16}[kind]
    assert 'uneven="exact"' in texts[0]


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        ("in order", {}),
        ("drop_last", {}),
        ("shuffled", {"uneven": "exact"}),
        ("shuffled", {"uneven": "pad"}),
        ("shuffled", {"grad": True}),
    ],
)
def test_loaders_without_padding_that_counts_are_not_warned_of(ranks, kind, keywords):
    assert [texts for _, texts in ranks.run(evaluate, kind, world_size=2, **keywords)] == [[], []]
    assert evaluate(kind, **keywords)[1] == []


def read_ahead(loader):
    batches: Queue = Queue(2)

    def read():
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    thread = threading.Thread(target=read)
    thread.start()
    yield from iter(batches.get, None)
    thread.join()


def trained(ahead: bool):
    fabric = started()
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.001))
    data = TensorDataset(torch.arange(24.0)[:, None])
    loader = fabric.setup_dataloaders(DataLoader(data, 4 // fabric.world_size, shuffle=True))
    for _ in range(10):
        for (x,) in read_ahead(loader) if ahead else loader:
            optimizer.zero_grad()
            fabric.backward(model(x).square().mean())
            optimizer.step()
    return model.module.weight.item()


def test_a_thread_that_reads_ahead_sends_no_messages(ranks):
    """They would overlap with those of backward, in an order that differs by rank."""
    assert ranks.run(trained, True, world_size=2) == ranks.run(trained, False, world_size=2)
