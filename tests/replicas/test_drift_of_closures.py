"""Steps whose closure computes the gradients are compared, too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import ReplicasDivergedError

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def drift(strategy):
    """The error of six steps with a closure; rank 1 writes a weight after the third one."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = X[fabric.global_rank :: fabric.world_size]

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        fabric.backward(loss)
        return loss

    try:
        for number in range(6):
            optimizer.step(closure)
            if number == 2 and fabric.global_rank:
                with torch.no_grad():
                    next(model.parameters()).add_(1)
    except ReplicasDivergedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_steps_with_a_closure_are_compared(ranks, strategy):
    found = ranks.run(drift, strategy, world_size=2)
    assert found[0] is not None
    assert found == [found[0]] * 2
    assert found[0].startswith("0.weight of model 0 (Sequential) ")
