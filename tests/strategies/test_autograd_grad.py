"""Gradients of `torch.autograd.grad`, which no layout averages, under replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import grad

from fabric import Fabric
from fabric.core.errors import UsageError

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def started(strategy):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return fabric, *fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def by_hand(strategy, averaged, made=lambda one: one):
    """After steps that fabric averages, one whose gradients the loop computes itself."""
    fabric, model, optimizer = started(strategy)
    x = X[fabric.global_rank :: fabric.world_size]
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(model(x).square().mean())
        optimizer.step()
    optimizer.zero_grad()
    gradients_of = grad if fabric.global_rank else torch.autograd.grad
    grads = gradients_of(model(x).square().mean(), model.parameters())  # a generator
    grads = fabric.all_reduce(list(grads)) if averaged else grads
    for p, one in zip(model.parameters(), grads, strict=True):
        p.grad = made(one)
    if averaged:
        optimizer.step()
    else:
        with pytest.raises(UsageError, match=r"the loop has set p.grad \(torch.autograd.grad\)"):
            optimizer.step()


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_they_are_compared_at_the_step_that_uses_them(ranks, strategy, averaged, world):
    ranks.run(by_hand, strategy, averaged, world_size=world)


def halved(one):
    return one / 2


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("made", [halved, torch.clone])
@pytest.mark.parametrize("averaged", [False, True])
def test_what_the_loop_makes_of_them_is_compared_too(ranks, strategy, made, averaged):
    ranks.run(by_hand, strategy, averaged, made, world_size=2)


def looked_at():
    """Rank zero looks at gradients by itself; all ranks replace those of a backward."""
    fabric, model, optimizer = started("ddp")
    x = X[fabric.global_rank :: fabric.world_size]
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        fabric.backward(loss, retain_graph=True)
        if fabric.is_global_zero:
            torch.autograd.grad(loss, [*model.parameters()])
        for p in model.parameters():
            p.grad = p.grad * 0.5
        optimizer.step()


def test_a_look_on_rank_zero_is_no_call_of_all_ranks(ranks):
    ranks.run(looked_at, world_size=2)


def before_an_accumulation():
    """A look at a gradient, and then a step with gradients of a backward under no_backward_sync alone."""
    fabric, model, optimizer = started("ddp")
    x = X[fabric.global_rank :: fabric.world_size]
    fabric.backward(model(x).square().mean())
    optimizer.step()
    torch.autograd.grad(model.module(x).mean(), model.module[2].weight)
    with fabric.no_backward_sync(model):
        fabric.backward(model(x).square().mean())
    with pytest.raises(UsageError, match="were never synchronised"):
        optimizer.step()


def test_a_look_hides_no_gradients_of_an_accumulation(ranks):
    ranks.run(before_an_accumulation, world_size=2)


def of_shards(strategy, allow_unused):
    """Gradients of sharded parameters."""
    fabric, model, _ = started(strategy)
    for names in ((), ("0.weight",)):
        held = [p for name, p in model.named_parameters() if name in names or not names]
        text = "called for the gradient of 0.weight, which is a shard: .* Write fabric.backward"
        with pytest.raises(UsageError, match=text):
            torch.autograd.grad(model(X).square().mean(), held, allow_unused=allow_unused)
        with pytest.raises(UsageError, match=text):
            fabric.backward(model(X).square().mean(), inputs=iter(held))
    x = X.clone().requires_grad_()
    fabric.backward(model(x).sum(), inputs=x)
    assert all(p.grad is None for p in model.parameters())
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    assert slope.abs().sum() > 0
    assert torch.equal(x.grad, slope)
    fabric.backward(model(X).square().mean())


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
@pytest.mark.parametrize("allow_unused", [False, True])
def test_those_of_shards_are_refused(ranks, strategy, allow_unused):
    ranks.run(of_shards, strategy, allow_unused, world_size=2)


def beside(strategy, where):
    """Gradients that the loop only looks at, or that are a part of the loss."""
    fabric, model, optimizer = started(strategy)
    x = X[fabric.global_rank :: fabric.world_size]
    for _ in range(4):
        optimizer.zero_grad()
        if where == "rank zero" and fabric.global_rank == 0:
            torch.autograd.grad(model.module(x).mean(), model.module[2].weight)
        loss = model(x).square().mean()
        if where == "before the backward":
            torch.autograd.grad(loss, model.module[2].weight, retain_graph=True)
        fabric.backward(loss)
        if where == "after the backward" and fabric.global_rank == 0:
            torch.autograd.grad(model.module(x).mean(), list(model.module.parameters()))
        if where == "before a clip":
            held = (
                torch.autograd.grad(model.module(x).mean(), model.parameters())
                if fabric.is_global_zero
                else ()
            )
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # changes all gradients in place
            del held
        optimizer.step()
    fabric.check_replicas()


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("where", ["rank zero", "before the backward", "after the backward", "before a clip"])
def test_a_look_at_them_is_no_error(ranks, strategy, where):
    ranks.run(beside, strategy, where, world_size=2)


def replaced(strategy, averaged, looked):
    """Gradients in the place of those of a backward."""
    fabric, model, optimizer = started(strategy)
    x = X[fabric.global_rank :: fabric.world_size]
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        fabric.backward(loss, retain_graph=True)
        if looked and fabric.is_global_zero:
            torch.autograd.grad(loss, [*model.parameters()])
        for p in model.parameters():
            p.grad = 0.5 * (p.grad if averaged else x.mean() * torch.ones_like(p))
        optimizer.step()


def test_what_replaces_averaged_gradients_is_compared_where_parameters_would_not_show_it(ranks):
    for looked in (False, True):
        ranks.run(replaced, "zero1", True, looked, world_size=2)
    for error in ranks.run_expecting_errors(replaced, "zero1", False, False, world_size=2):
        assert "SGD.step() was called with gradients that were never synchronised" in str(error)
    for error in ranks.run_expecting_errors(replaced, "ddp", False, False, world_size=2):
        assert type(error).__name__ == "ReplicasDivergedError"
