"""Sequences divided in a model whose blocks FSDP2 has split over more ranks than share a sequence.

A new kind of call is tried in one row of ranks alone, while the other row goes on.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.strategies import ContextParallel, FSDPStrategy


class Attention(nn.Module):
    """Keys share the weight of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = [nn.Linear(6, 6) for _ in range(3)]
        self.key.weight = self.query.weight

    def forward(self, x, mask=None):
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), attn_mask=mask)


class Block(nn.Module):
    """Attention between two layers; `mean`: and something along the sequence that cannot be divided."""

    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.mean = mean
        self.norm, self.attention, self.out = nn.LayerNorm(6), Attention(), nn.Linear(6, 6)

    def forward(self, x, mask=None):
        x = x + self.out(torch.tanh(self.attention(self.norm(x), mask)))
        return x - x.mean(1, keepdim=True) if self.mean else x


class Net(nn.Module):
    """Two blocks."""

    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.blocks = nn.ModuleList([Block(mean), Block()])

    def forward(self, x, mask=None):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


def net(mean=False):
    torch.manual_seed(5)
    return Net(mean).double()


def launched(blocks, groups, **settings):
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=FSDPStrategy(
            auto_wrap_policy=groups, context_parallel=ContextParallel(2, blocks=blocks), **settings
        ),
    )
    fabric.launch()
    return fabric


def batch(row: int, step: int, length: int, masked: bool):
    """The arguments of a row in a step, the same on every rank."""
    random = torch.Generator().manual_seed(17 * step + row)
    x = torch.randn(5, length, 3, generator=random, dtype=torch.float64)
    return (x, torch.ones(length, length, dtype=torch.bool).tril()) if masked else (x,)


# (length, masked) of the first row and of the second, step by step: new kinds come up in one row alone
STEPS = [((8, False), (3, False)), ((8, False), (2, True)), ((9, True), (8, False)), ((3, True), (12, True))]


def evaluates(model, plain, row, count):
    model.eval()
    with torch.no_grad():
        for step in range(count):
            given = batch(row, 50 + step, 7 + step, masked=step % 2 == 1)
            torch.testing.assert_close(model(*given), plain(*given))
    model.train()


def rows_that_differ(blocks, groups, settings):
    warnings.filterwarnings("ignore", "The loss of a backward divides by")  # a mean of means is meant
    fabric = launched(blocks, groups, **settings)
    row, rows = fabric.strategy.data_rank
    plain = net()
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    evaluates(model, plain, row, 2)  # the first forwards of all
    for number, kinds in enumerate(STEPS):
        fabric.backward(model(*batch(row, number, *kinds[row])).pow(2).mean())
        given = [batch(r, number, *kinds[r]) for r in range(rows)]
        torch.stack([plain(*one).pow(2).mean() for one in given]).mean().backward()
        for one in (optimizer, steps):
            one.step()
            one.zero_grad()
        evaluates(model, plain, row, 2 * (number % 2))
    fabric.barrier()
    state = fabric.strategy.get_module_state_dict(model)
    for key, value in plain.state_dict().items():
        whole = state[key].full_tensor() if hasattr(state[key], "full_tensor") else state[key]
        torch.testing.assert_close(whole, value)


@pytest.mark.parametrize(
    ("blocks", "groups", "settings"),
    [
        (None, {Block}, {}),
        (None, {Block}, {"cpu_offload": True}),
        (None, {Block, Attention}, {"sharding_strategy": "SHARD_GRAD_OP"}),
        ({Block}, {Attention}, {}),
        ({Attention}, {Block}, {}),
    ],
    ids=["model", "offloaded", "nested", "groups inside", "groups outside"],
)
def test_rows_may_meet_other_kinds_of_calls(ranks, blocks, groups, settings):
    ranks.run(rows_that_differ, blocks, groups, settings, world_size=4)


def cannot_be_divided(masked):
    fabric = launched(None, {Block})
    model, plain = fabric.setup(net(mean=True)), copy.deepcopy(net(mean=True))
    row, _ = fabric.strategy.data_rank
    given = batch(row, 0, 3, masked=False)  # too short to be divided
    torch.testing.assert_close(model(*given), plain(*given))
    model(*batch(row, 1, 8, masked))


@pytest.mark.parametrize("masked", [False, True])
def test_what_cannot_be_divided_is_found_without_the_parameters(ranks, masked):
    for error in ranks.run_expecting_errors(cannot_be_divided, masked, world_size=4):
        assert isinstance(error, UsageError)
        assert "Net gives other numbers for the parts of a sequence than for the whole" in str(error)


class Shifts(nn.Module):
    """Hands its parameter to what no mode of torch functions looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def forward(self, x):
        return torch.vmap(torch.mul, in_dims=(2, 0), out_dims=2)(x, self.shift)


def mapped():
    fabric = launched(None, {Shifts})
    model = fabric.setup(nn.Sequential(nn.Linear(3, 6).double(), Shifts()))
    with pytest.raises(UsageError, match=r"computes \(.*test_context_parallel_groups.py:\d+\) with a tensor"):
        model(batch(0, 0, 8, False)[0])


def test_functions_that_no_mode_sees_are_refused_in_groups_that_are_split(ranks):
    ranks.run(mapped, world_size=2)
