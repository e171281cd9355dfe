"""Parameters of an optimizer that belong to no model are compared, also if no model is trained."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import ReplicasDivergedError


def drift(strategy, with_model, steps=4):
    """The error of some steps of one free parameter; rank 1 writes it after the third one."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(nn.Linear(4, 1)) if with_model else None
    prompt = nn.Parameter(torch.zeros(4))
    optimizer = fabric.setup_optimizers(torch.optim.SGD([prompt], lr=0.1))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))[fabric.global_rank :: fabric.world_size]
    try:
        for number in range(steps):
            optimizer.zero_grad()
            loss = (x @ prompt - 1).square().mean()
            if with_model == "trained":
                loss = loss + model(x).square().mean()
            fabric.backward(loss)
            optimizer.step()
            if number == 2 and fabric.global_rank:
                with torch.no_grad():
                    prompt.add_(1)
    except ReplicasDivergedError as error:
        return str(error)
    check = fabric.strategy.find_part("replica check")
    return check.backwards


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("with_model", [None, "beside", "trained"])
def test_free_parameters_that_differ_are_an_error(ranks, strategy, with_model):
    if strategy == "fsdp" and with_model == "trained":
        with_model = "beside"  # its steps are those of the model's optimizer, which has none here
    found = ranks.run(drift, strategy, with_model, world_size=2)
    assert found == [found[0]] * 2
    assert found[0].startswith("parameter 0 of optimizer 0 (SGD) differs between ranks (0: ")


@pytest.mark.parametrize("with_model", [None, "trained"])
def test_a_backward_counts_once(ranks, with_model):
    assert ranks.run(drift, "ddp", with_model, 3, world_size=2) == [3, 3]
