"""Buffers of models without trainable parameters, which forwards in training change: centers, teachers."""

from __future__ import annotations

import warnings

import pytest
import torch
from data_cases import launched
from torch import nn

from fabric.core.errors import CollectiveMismatch
from fabric.utilities.warnings import PossibleUserWarning

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


class Center(nn.Module):
    """A running mean of its inputs, as in DINO's loss; with a frozen layer it is a teacher."""

    def __init__(self, layer=None):
        super().__init__()
        self.layer = layer or nn.Identity()
        self.register_buffer("mean", torch.zeros(4))
        self.requires_grad_(False)

    def forward(self, z):
        z = self.layer(z)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(z.mean(0), 0.1)
        return z - self.mean


def trained(strategy, how):
    """The running mean, which all ranks must have, and what the rank warns of."""
    fabric = launched(strategy)
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    center = fabric.setup_module(Center(nn.Linear(4, 4) if how == "teacher" else None))
    center.train(how != "eval")
    x = X[fabric.global_rank :: fabric.world_size]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            if how == "teacher":
                with torch.no_grad():
                    target = center(x)
                loss = (model(x) - target).square().mean()
            else:
                loss = center(model(x)).square().mean()
            fabric.backward(loss)
            optimizer.step()
    return center.mean.tolist(), [str(w.message) for w in caught if w.category is PossibleUserWarning]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("how", ["center", "teacher"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_get_those_of_rank_zero_and_are_warned(ranks, strategy, how, world):
    (first, (told,)), *others = ranks.run(trained, strategy, how, world_size=world)
    assert told.startswith("forward changed buffers of Center by each rank's part of the batch: mean. ")
    assert others == [(first, [])] * (world - 1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_models_in_evaluation_are_left_alone(ranks, strategy):
    assert ranks.run(trained, strategy, "eval", world_size=2) == [([0.0] * 4, [])] * 2


def deleted_on_a_rank(strategy):
    """A model that rank zero still has is not called again; nobody waits for it."""
    fabric = launched(strategy)
    torch.manual_seed(1)
    model = nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    centers = [fabric.setup_module(Center()), fabric.setup_module(Center())]
    x = X[: 4 * fabric.world_size]  # the same mean on all ranks
    for step in range(4):
        optimizer.zero_grad()
        fabric.backward(centers[-1](model(x)).square().mean())
        optimizer.step()
        if step == 1 and not fabric.is_global_zero:
            del centers[0]
    return centers[-1].mean.tolist()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_that_some_ranks_have_deleted_is_not_waited_for(ranks, strategy):
    first, second = ranks.run(deleted_on_a_rank, strategy, world_size=2)
    assert first == second


def called_on_one_rank():
    fabric = launched()
    model = nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    center = fabric.setup_module(Center())
    if fabric.is_global_zero:
        center(X)
    fabric.backward(model(X).mean())
    optimizer.step()
    fabric.barrier()


def test_a_forward_of_one_rank_is_an_error_of_all(ranks):
    for error in ranks.run_expecting_errors(called_on_one_rank, world_size=2):
        assert isinstance(error, CollectiveMismatch)
        assert "buffers of Center, which a forward changed" in str(error)
