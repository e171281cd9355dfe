"""A training epoch whose last batch does not divide by the ranks: one warning."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.strategies import LocalSGDStrategy
from fabric.utilities.warnings import RanksDifferWarning


def warned(rows, loader=None, setup=None, *, train=True, normalize=False, epochs=2, local=False):
    """The texts of the warnings of this rank; `local`: ranks train independently, a round is one step."""
    strategy = LocalSGDStrategy(sync_every=1) if local else "auto"
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = TensorDataset(torch.ones(rows, 4))
    batches = fabric.setup_dataloaders(DataLoader(data, batch_size=4, **(loader or {})), **(setup or {}))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for (x,) in batches:
                optimizer.zero_grad()
                loss = model(x).square()
                if train is True or (train == "whole batches" and len(x) == 4):
                    fabric.backward(loss.sum() if normalize else loss.mean())
                    if normalize:
                        fabric.normalize_gradients(model, len(x))
                    optimizer.step()
    return [str(one.message) for one in found if issubclass(one.category, RanksDifferWarning)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_last_batch_that_does_not_divide_is_warned_of_once(ranks, world, shuffle):
    rows = 8 * world - 1
    first, *others = ranks.run(warned, rows, {"shuffle": shuffle}, world_size=world)
    assert len(first) == 1
    assert (
        f"The last batch of this epoch has {4 * world - 1} rows, which {world} ranks cannot share" in first[0]
    )
    assert others == [[]] * (world - 1)


def test_a_rest_smaller_than_the_ranks_is_counted_with_the_batch_that_takes_it(ranks):
    assert "has 9 rows, which 2 ranks" in ranks.run(warned, 17, world_size=2)[0][0]


@pytest.mark.parametrize(
    ("rows", "kwargs"),
    [
        (16, {}),
        (14, {}),  # 3 and 3 rows
        (15, {"loader": {"drop_last": True}}),
        (15, {"setup": {"uneven": "exact"}}),
        (15, {"setup": {"uneven": "pad"}}),
        (15, {"setup": {"uneven": "drop"}}),
        (15, {"train": False}),
        (13, {"train": "whole batches"}),  # the last one has 3 and 2 rows
        (15, {"normalize": True}),
        (15, {"epochs": 0}),
        (15, {"local": True}),
    ],
)
def test_nothing_is_warned_of_where_it_is_right_or_chosen(ranks, rows, kwargs):
    assert ranks.run(warned, rows, world_size=2, **kwargs) == [[], []]
