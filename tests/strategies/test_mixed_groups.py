"""Optimizers of shards and of whole parameters in one group: `foreach` of torch takes one kind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric


def stepped(strategy, optimizer, settings, set_to_none=True) -> list[torch.Tensor]:
    """The parameters after three steps."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(3)
    model, free = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Parameter(torch.ones(4))
    one = getattr(torch.optim, optimizer)([free, *model.parameters()], lr=0.05, **settings)
    model = fabric.setup_module(model)
    one = fabric.setup_optimizers(one)
    for number in range(3):
        one.zero_grad(set_to_none=set_to_none)
        x = torch.ones(2, 4) * (1 + fabric.global_rank)
        fabric.backward((model(x) * free - number).square().mean())
        one.step()
    assert [len(group["params"]) for group in one.param_groups] == [5]
    with fabric.whole(model) as whole:
        return [] if whole is None else [free.detach(), *[p.detach().clone() for p in whole.parameters()]]


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("AdamW", {"amsgrad": True}),
        ("RMSprop", {"momentum": 0.5, "weight_decay": 0.1}),
        ("Adagrad", {}),
    ],
)
def test_they_step_as_replicas_do(ranks, strategy, optimizer, settings):
    found = ranks.run(stepped, strategy, optimizer, {**settings, "foreach": True}, world_size=2)[0]
    expected = ranks.run(stepped, "ddp", optimizer, settings, world_size=2)[0]
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}])
def test_their_gradients_are_set_to_zero(ranks, strategy, settings):
    found = ranks.run(stepped, strategy, "Adam", settings, set_to_none=False, world_size=2)[0]
    expected = ranks.run(stepped, "ddp", "Adam", {}, set_to_none=False, world_size=2)[0]
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
