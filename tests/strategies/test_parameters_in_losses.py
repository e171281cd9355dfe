"""A parameter of a model that multiplies losses outside of its forward, as learned weights of tasks do."""

from __future__ import annotations

import pytest
import torch
from data_cases import launched
from torch import nn

from fabric.core.errors import UsageError

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.log_vars = nn.Linear(4, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return self.layer(x), self.log_vars


def loss_of(out, log_vars):
    return (torch.exp(-log_vars) * (out - 1).square().mean(0) + log_vars).sum()


def plain():
    torch.manual_seed(1)
    model = Tasks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(*model(X)).backward()
        optimizer.step()
    return model.state_dict()


def trained(strategy):
    fabric = launched(strategy)
    torch.manual_seed(1)
    model = Tasks()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = X[fabric.global_rank :: fabric.world_size]
    if strategy in ("fsdp", "zero2"):
        with pytest.raises(UsageError, match=r"If it multiplies losses .* return it from the forward"):
            fabric.backward(torch.exp(-model.log_vars[0]) * model(x)[0].mean())
        optimizer.zero_grad()
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(loss_of(*model(x)))
        optimizer.step()
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("world", [2, 3])
def test_the_forward_returns_it(ranks, strategy, world):
    wanted = dict(plain())
    for state in ranks.run(trained, strategy, world_size=world):
        torch.testing.assert_close(state, wanted)
