"""Batches whose first dimension has no samples: nodes of graphs, steps of time."""

from __future__ import annotations

import warnings

import pytest
import torch
from data_cases import launched
from torch import nn
from torch.utils.data import DataLoader

from fabric.utilities.warnings import RanksDifferWarning

LENGTHS = [2, 3, 4, 7, 5, 3, 6, 8]
SAMPLES = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def time_first(samples):
    return nn.utils.rnn.pad_sequence(samples), torch.tensor([len(each) for each in samples])


def nodes(samples):
    """One disjoint union of graphs."""
    return torch.cat(samples), torch.tensor([len(each) for each in samples])


LOSSES = {
    "mean over nodes": (nodes, lambda out, lengths: out.square().mean()),
    "mean over graphs": (
        nodes,
        lambda out, lengths: torch.stack([part.norm() for part in out.split(lengths.tolist())]).mean(),
    ),
    "sum by steps": (time_first, lambda out, lengths: out.square().sum() / len(out)),
    "mean over sequences": (time_first, lambda out, lengths: (out.square().sum(0) / lengths[:, None]).mean()),
}


def heard(how, sharded, strategy="ddp"):
    """What a rank warns of in two epochs of two batches."""
    fabric = launched(strategy)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    collate, loss_of = LOSSES[how]
    batches = DataLoader(SAMPLES, batch_size=2, collate_fn=collate)
    if sharded:
        batches = fabric.setup_dataloaders(batches)
    else:
        own = [SAMPLES[start + fabric.global_rank :: 4] for start in (0, 2)]
        batches = [collate(samples) for samples in own]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for x, lengths in batches:
                optimizer.zero_grad()
                fabric.backward(loss_of(model(x), lengths))
                optimizer.step()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


@pytest.mark.parametrize("how", ["mean over nodes", "sum by steps"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_mean_over_unequal_numbers_of_nodes_or_steps_is_said_once(ranks, how, strategy):
    (told,), others = ranks.run(heard, how, True, strategy, world_size=2)
    assert told.startswith("The loss of a backward divides by ")
    assert others == []


@pytest.mark.parametrize("how", ["mean over graphs", "mean over sequences"])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_mean_over_samples_is_not_warned_of(ranks, how, sharded):
    assert ranks.run(heard, how, sharded, world_size=2) == [[], []]
