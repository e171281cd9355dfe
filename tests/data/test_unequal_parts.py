"""Parts of unequal size that ranks were given by hand are warned of once, with the sizes; nothing else is."""

from __future__ import annotations

import warnings

import pytest
import torch
from data_cases import launched
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric.strategies import DDPStrategy
from fabric.utilities.warnings import RanksDifferWarning

ROWS = 5


class Keyed(nn.Module):
    """Called with keywords."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, *, scale, x):
        return scale * self.linear(x)


def parts(rank, world_size):
    return torch.arange(4.0 * ROWS).view(ROWS, 4).chunk(world_size)[rank]


def trained(how="by hand", strategy="ddp", steps=3):
    """What a rank hears of a loop in which each has a chunk of 5 rows."""
    fabric = launched(DDPStrategy(find_unused_parameters=True) if strategy == "unused" else strategy)
    model = Keyed() if how == "keywords" else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    x = parts(fabric.global_rank, fabric.world_size)
    if how == "equal":
        x = x[:1]
    if how == "own loader":
        x = DataLoader(TensorDataset(x), batch_size=len(x))
        batches = fabric.setup_dataloaders(x, use_distributed_sampler=False)
    elif how == "loader":
        batches = fabric.setup_dataloaders(DataLoader(TensorDataset(x.new_ones(5, 4)), 9), uneven="exact")
    else:
        batches = [(x,)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            for (x,) in batches:
                optimizer.zero_grad()
                if how == "evaluated first":
                    with torch.no_grad():
                        model(x[:1])
                out = model(scale=2.0, x=x) if how == "keywords" else model(x)
                fabric.backward(out.sum() if how == "normalised" else out.mean())
                if how == "normalised":
                    fabric.normalize_gradients(model, len(x))
                optimizer.step()
    hooks = sum(len(part._forward_pre_hooks) for part in model.module.modules() if strategy == "ddp")
    return [str(w.message) for w in caught if w.category is RanksDifferWarning], hooks


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_of_unequal_size_are_said_once(ranks, strategy, world_size):
    (told, hooks), *others = ranks.run(trained, "by hand", strategy, world_size=world_size)
    shown = "3 on rank 0, 2 on rank 1" if world_size == 2 else "2 on rank 0, 2 on rank 1, 1 on rank 2"
    assert told == [
        f"Ranks were given unequal numbers of rows: {shown}. Gradients are averaged over ranks, so a row of "
        "a smaller batch has more weight. Shard with fabric.setup_dataloaders(loader); or sum the losses of "
        "rows, and write fabric.normalize_gradients(model, num_rows) before each step."
    ]
    assert others == [([], 0)] * (world_size - 1)
    assert hooks == 0, "nothing is left in the forward"


@pytest.mark.parametrize("how", ["keywords", "evaluated first", "own loader"])
def test_it_is_the_first_tensor_of_a_forward_in_training(ranks, how):
    (told, _), _ = ranks.run(trained, how, world_size=2)
    assert [text.partition(". ")[0] for text in told] == [
        "Ranks were given unequal numbers of rows: 3 on rank 0, 2 on rank 1"
    ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", ["equal", "normalised", "loader"])
def test_loops_whose_rows_count_alike_hear_nothing(ranks, how, strategy):
    assert ranks.run(trained, how, strategy, world_size=2) == [([], 0)] * 2


def test_ranks_that_may_skip_layers_are_compared(ranks):
    assert len(ranks.run(trained, "by hand", "unused", world_size=2)[0][0]) == 1


def counted(steps):
    """How many messages about rows each step of a loop of equal parts sends."""
    from fabric.collectives.channel import Channel

    fabric = launched()
    model, optimizer = fabric.setup(m := nn.Linear(4, 1), torch.optim.SGD(m.parameters(), lr=0.1))
    calls, met = [], Channel.check_call
    Channel.check_call = lambda *args: calls.append(args[1].verb) or met(*args)
    try:
        found = []
        for _ in range(steps):
            fabric.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            found.append(calls.count("replica check of rows"))
            calls.clear()
    finally:
        Channel.check_call = met
    return found


def test_a_loop_sends_one_message_in_all(ranks):
    assert ranks.run(counted, 4, world_size=2) == [[0, 1, 0, 0]] * 2
