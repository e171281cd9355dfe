"""Models that share modules are compared, also in steps that train only what they share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import ReplicasDivergedError

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def drift(strategy, alone):
    """The error of four steps of one model, which has no parameters of its own if `alone`; rank 1 writes a
    weight after the third one.
    """
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    encoder = nn.Linear(4, 8)
    actor = encoder if alone else nn.Sequential(encoder, nn.Tanh(), nn.Linear(8, 1))
    critic = nn.Sequential(encoder, nn.BatchNorm1d(8), nn.Linear(8, 1))
    actor, optimizer = fabric.setup(actor, torch.optim.SGD(actor.parameters(), lr=0.1))
    critic = fabric.setup(critic)
    x = X[fabric.global_rank :: fabric.world_size]
    try:
        for number in range(4):
            critic(x)  # its statistics differ between ranks until its next backward
            optimizer.zero_grad()
            fabric.backward(actor(x).square().mean())
            optimizer.step()
            if number == 2 and fabric.global_rank:
                with torch.no_grad():
                    encoder.bias.add_(1)
    except ReplicasDivergedError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore:.*batch norm in training")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_steps_of_shared_parameters_are_compared(ranks, strategy, alone, world):
    found = ranks.run(drift, strategy, alone, world_size=world)
    assert found[0] is not None
    assert found == found[:1] * world
    assert "bias" in found[0]
