"""`p.grad.data = ...` under DDP, and parameters that no rank uses, beside plain torch on the joined batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.strategies import DDPStrategy, FSDPStrategy

STRATEGIES = {
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "without views": lambda: DDPStrategy(gradient_as_bucket_view=False),
    "unused": lambda: "ddp_find_unused_parameters_true",
    "zero3 unused": lambda: FSDPStrategy(find_unused_parameters=True),
    "zero2 unused": lambda: FSDPStrategy(find_unused_parameters=True, sharding_strategy="SHARD_GRAD_OP"),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, some: bool = False):
        return self.sometimes(self.used(x)) if some else self.used(x)


def fabric_of(strategy: str) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES[strategy]())
    fabric.launch()
    return fabric


def halved(how: str, fabric: Fabric | None) -> dict:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    x = torch.randn(4, 12, 4, dtype=torch.float64)
    backward = torch.Tensor.backward
    if fabric is not None:
        model, optimizer = fabric.setup(model, optimizer)
        x, backward = x[:, fabric.global_rank :: fabric.world_size], fabric.backward
    for batch in x:
        if how != "accumulated":
            optimizer.zero_grad(set_to_none=how != "zeroed")
        backward(model(batch).pow(2).mean())
        for i, parameter in enumerate(model.parameters()):
            if how != "one" or i == 1:
                parameter.grad.data = parameter.grad.data * 0.5
        if how == "local":
            with torch.enable_grad() if fabric is None else fabric.no_backward_sync(model):
                backward((model(x[0] if fabric is None else batch * 0) * 0).mean())
            backward(model(batch).sin().mean())
        optimizer.step()
    return model.state_dict()


def as_plain(strategy: str) -> None:
    fabric = fabric_of(strategy)
    for how in ("all", "one", "zeroed", "accumulated", "local"):
        expected, found = halved(how, None), halved(how, fabric)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, msg=f"{how}: {key}")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "without views", "unused"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_whose_data_was_assigned(ranks, strategy, world_size):
    ranks.run(as_plain, strategy, world_size=world_size)


def decayed(strategy: str) -> None:
    fabric = fabric_of(strategy)
    torch.manual_seed(0)
    model = Net().double()
    before = model.never.weight.detach().clone()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    for step in range(3):
        optimizer.zero_grad()
        # On one rank in the second step: zeros count for the others.
        some = step == 1 and fabric.global_rank == 1
        fabric.backward(model(torch.ones(2, 4, dtype=torch.float64), some).pow(2).mean())
        assert model.never.weight.grad is None
        assert (model.sometimes.weight.grad is not None) == (step == 1)
        assert model.used.weight.grad is not None
        optimizer.step()
    after = model.state_dict()
    assert torch.equal(after["never.weight"], before)
    sums = fabric.all_gather(torch.stack([value.sum() for value in after.values()]))
    assert torch.equal(sums, sums[:1].expand_as(sums))


@pytest.mark.parametrize("strategy", ["unused", "zero3 unused", "zero2 unused"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_no_rank_uses_has_no_gradient(ranks, strategy, world_size):
    ranks.run(decayed, strategy, world_size=world_size)
