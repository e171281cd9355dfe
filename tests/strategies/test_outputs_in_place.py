"""Outputs that are views (those of `nn.Linear` in three dimensions): no copies; changes in place count."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.strategies import FSDPStrategy

X = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.norm(x)))


class Rows(nn.Module):
    """Gives a view of what it was given, beside a view of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = x + 1
        return {"given": x[:, 1:], "own": self.layer(y).chunk(2, dim=-1), "flat": (self.layer(y).view(-1),)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.rows, self.head = Block(), Block(), Rows(), nn.Linear(4, 4)

    def forward(self, x):
        h = self.one(x)
        h += x
        h = self.two(h)
        h *= 2
        found = self.rows(h)
        found["given"] += 1
        found["flat"][0].mul_(found["given"].mean())
        return self.head(torch.cat([*found["own"]], -1) + found["flat"][0].view_as(h))

    def encode(self, x):
        h = self.two(self.one(x))
        h += x
        return self.head(torch.cat([*self.rows(h)["own"]], -1))


def net() -> Net:
    torch.manual_seed(1)
    return Net().double()


STRATEGIES = {
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "zero2": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={Block, Rows}),
    "zero3": lambda: FSDPStrategy(auto_wrap_policy={Block, Rows, nn.Linear}),
    "one-group": FSDPStrategy,
    "checkpointed": lambda: FSDPStrategy(auto_wrap_policy={Block}, activation_checkpointing_policy={Block}),
    "offload": lambda: FSDPStrategy(auto_wrap_policy={Block}, cpu_offload=True),
}


def launched(strategy: str) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES[strategy]())
    fabric.launch()
    return fabric


def loss_of(model, x, how: str):
    out = model.encode(x) if how == "method" else model(x)
    if how == "added":
        out += 1
    elif how in ("scaled", "method"):
        out.mul_(x)
    elif how == "zeroed":
        out[:, 0].zero_()
    return out.pow(2).mean()


def off_by(strategy: str) -> tuple[list[str], list]:
    fabric = launched(strategy)
    found, statistics = [], []
    for how in ("nothing", "added", "scaled", "zeroed", "method"):
        plain, model = net(), net()
        # Batch norm sees a rank's part only: every rank gets the same rows.
        x = X[:2]
        model = fabric.setup_module(model)
        if fabric.global_rank:
            for buffer in model.module.buffers():
                buffer.zero_()
        loss_of(plain, x, how).backward()
        for _ in range(2):
            model.zero_grad()
            fabric.backward(loss_of(model, x, how))
        grads = {n: p.grad for n, p in model.module.named_parameters()}
        for name, p in plain.named_parameters():
            grad = grads[name]
            if p.grad is None or grad is None:
                if p.grad is not grad:
                    found.append(f"{how}: {name} has a gradient on one side only")
                continue
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            off = (grad - p.grad).abs().max().item()
            if not off < 1e-12:
                found.append(f"{how}: {name} is off by {off:.2e}")
        statistics.append([buffer.tolist() for buffer in model.module.buffers()])
    return found, statistics


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_outputs_that_are_changed_in_place(ranks, strategy):
    (first, statistics), (second, others) = ranks.run(off_by, strategy, world_size=2)
    assert not first + second, "\n".join(first + second)
    assert statistics == others  # rank zero's


def copies(strategy: str) -> list[bool]:
    fabric = launched(strategy)
    inner = net()
    model = fabric.setup_module(nn.Sequential(inner, nn.Flatten(0, 1)))  # whose output is a view
    seen = []
    for layer in (inner.one.layer, inner.head):
        layer.register_forward_hook(lambda layer, args, out: seen.append(out.data_ptr()))
    inner.one.register_forward_hook(lambda block, args, out: seen.append(out.data_ptr()))
    out = model(X)
    return [seen[0] == seen[1], seen[2] == out.data_ptr(), out._base is not None]


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "one-group"])
def test_outputs_that_are_views_are_not_copied(ranks, strategy):
    for found in ranks.run(copies, strategy, world_size=2):
        assert found == [True] * 3
