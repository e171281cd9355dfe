"""A trial that failed, and whose Fabric is garbage on some ranks only, takes no part in the next one."""

from __future__ import annotations

import gc

import pytest
import torch
from machine import ACCELERATOR
from torch import nn

from fabric import Fabric


class Failing(torch.autograd.Function):
    """A function whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("this trial fails")


class Middle(nn.Module):
    """Fails once the gradients of the layers after it are there."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x):
        return Failing.apply(x) if self.fails else x


def trial(strategy: str, size: int, fails: bool):
    f = Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy)
    f.launch()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), Middle(fails), nn.Linear(4, 2))
    model, optimizer = f.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return f, model, optimizer


KEPT = []


def failing(strategy: str, size: int) -> str:
    fabric, model, _ = trial(strategy, size, fails=True)
    if fabric.global_rank == 0:
        KEPT.append((fabric, model))  # on the other ranks it is garbage
    try:
        fabric.backward(model(torch.ones(2, 4, device=fabric.device)).sum())
    except ValueError as error:
        return str(error)
    return ""


def next_one(strategy: str, size: int) -> float:
    gc.collect()
    fabric, model, optimizer = trial(strategy, size, fails=False)
    x = torch.ones(2, 4, device=fabric.device)
    for _ in range(2):
        fabric.backward(model(x + fabric.global_rank).sum())
        optimizer.step()
        optimizer.zero_grad()
    KEPT.clear()
    return fabric.all_reduce(model(x).detach().sum()).item()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_the_next_trial_runs_alone(ranks, strategy, size):
    assert ranks.run(failing, strategy, size, world_size=size) == ["this trial fails"] * size
    assert len({*ranks.run(next_one, strategy, size, world_size=size, timeout=60)}) == 1
