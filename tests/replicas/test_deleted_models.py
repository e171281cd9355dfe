"""A rank may delete a model whose parameters an optimizer keeps: names do not depend on living models."""

from __future__ import annotations

import gc

import pytest
import torch
from data_cases import launched
from torch import nn


def steps(strategy, deleting):
    """The parameters after steps of which the last ones do not use the second model."""
    fabric = launched(strategy)
    torch.manual_seed(0)
    actor, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=0.1)
    actor, critic = fabric.setup_module(actor), fabric.setup_module(critic)
    optimizer = fabric.setup_optimizers(optimizer)
    for step in range(6):
        x = actor(torch.full((2, 2), 1.0 + fabric.global_rank))
        loss = x.square().mean() + (critic(x).square().mean() if step < 2 else 0)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(actor, optimizer, max_norm=1.0)
        optimizer.step()
        if step == 1 and fabric.global_rank in deleting:
            del critic
            gc.collect()
    optimizer.state_dict()
    return {name: value.tolist() for name, value in actor.state_dict().items()}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_model_that_some_ranks_have_deleted(ranks, strategy):
    expected = ranks.run(steps, strategy, [], world_size=2)
    assert ranks.run(steps, strategy, [1], world_size=2) == expected
