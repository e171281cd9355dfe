"""Steps of optimizers whose gradients nobody averages over ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError

DROPPED = (
    r"SGD\.step\(\) trains 0\.weight, 0\.bias, 1\.weight, 1\.bias of Sequential, whose gradients "
    r"are not averaged over ranks: the model that fabric\.setup returned was dropped\. Write "
    r"model, optimizer = fabric\.setup\(model, optimizer\), and call that model\."
)
LOSS = (
    r"SGD\.step\(\) trains proxies of ProxyLoss, .* Write loss_fn, loss_optimizer = fabric\.setup\(loss_fn, "
    r"loss_optimizer\), or average them"
)


class ProxyLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.ones(2, 4) * 0.1)

    def forward(self, features, labels):
        return nn.functional.cross_entropy(features @ self.proxies.T, labels)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def start(strategy: str) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def batch(fabric: Fabric):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1 + fabric.global_rank))
    return x, torch.arange(6) % 2


def dropped(strategy: str, case: str) -> None:
    fabric, model = start(strategy), net()
    optimizer = sgd(model)
    if case == "both":
        fabric.setup(model, optimizer)
    elif case == "model":
        _, optimizer = fabric.setup(model, optimizer)
        del _
    else:
        fabric.setup_module(model)
    loss = model(batch(fabric)[0]).pow(2).mean()
    loss.backward() if case == "plain" else fabric.backward(loss)
    with pytest.raises(UsageError, match=DROPPED):
        optimizer.step()


@pytest.mark.parametrize("case", ["both", "model", "optimizer", "plain"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_model_that_setup_returned_and_nobody_kept(ranks, strategy, case):
    ranks.run(dropped, strategy, case, world_size=2)


def loss_with_parameters(strategy: str, plain: bool) -> None:
    fabric, model, loss_fn = start(strategy), net(), ProxyLoss()
    model, optimizer = fabric.setup(model, sgd(model))
    loss_optimizer = sgd(loss_fn)
    x, labels = batch(fabric)
    loss = loss_fn(model(x), labels)
    loss.backward() if plain else fabric.backward(loss)
    optimizer.step()
    with pytest.raises(UsageError, match=LOSS):
        loss_optimizer.step()


def closure_of_a_model_that_was_forgotten(strategy: str, keyword: bool) -> None:
    fabric, model, other = start(strategy), net(), net()
    model, _ = fabric.setup(model, sgd(model))
    forgotten = sgd(other)

    def closure():
        forgotten.zero_grad()
        loss = other(batch(fabric)[0]).pow(2).mean()
        fabric.backward(loss)
        return loss

    text = r"SGD\.step\(\) trains 0\.weight, .* of Sequential, which was not set up"
    with pytest.raises(UsageError, match=text):
        forgotten.step(closure=closure) if keyword else forgotten.step(closure)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("strategy", "keyword"), [("ddp", False), ("zero1", False), ("fsdp", True)])
def test_a_closure_that_trains_a_model_which_was_forgotten(ranks, strategy, keyword, world_size):
    ranks.run(closure_of_a_model_that_was_forgotten, strategy, keyword, world_size=world_size)


@pytest.mark.parametrize(
    ("strategy", "plain"), [("ddp", False), ("ddp", True), ("zero1", False), ("fsdp", False)]
)
def test_a_loss_with_parameters_that_was_not_set_up(ranks, strategy, plain):
    ranks.run(loss_with_parameters, strategy, plain, world_size=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_that_was_not_set_up_on_three_ranks(ranks, strategy):
    ranks.run(loss_with_parameters, strategy, False, world_size=3)


def bare_parameter() -> None:
    fabric, weight = start("ddp"), nn.Parameter(torch.ones(4))
    fabric.setup(net())
    fabric.backward((weight * batch(fabric)[0]).sum())
    with pytest.raises(UsageError, match=r"trains 1 parameters, .*optimizer = fabric.setup_optimizers"):
        torch.optim.SGD([weight], lr=0.1).step()


def test_a_parameter_that_was_not_set_up(ranks):
    ranks.run(bare_parameter, world_size=2)


def gradients_that_differ_later(strategy: str) -> None:
    fabric, weight = start(strategy), nn.Parameter(torch.ones(4))
    fabric.setup(net())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        fabric.backward((weight * (batch(fabric)[0] if step > 1 else 1.0)).sum())
        if step == 3:
            with pytest.raises(UsageError, match=r"SGD\.step\(\) trains 1 parameters, which was not set up"):
                optimizer.step()
            return
        optimizer.step()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_gradients_that_are_equal_in_first_steps_and_differ_later(ranks, strategy):
    ranks.run(gradients_that_differ_later, strategy, world_size=2)


def no_error(case: str, strategy: str) -> None:
    fabric, loss_fn, module = start(strategy), ProxyLoss(), net()
    loss_optimizer = sgd(loss_fn)
    x, labels = batch(fabric)
    if case == "raw optimizer":
        model = fabric.setup_module(module)
        fabric.backward(model(x).sum())
        sgd(model).step()
        return
    model, optimizer = fabric.setup(module, sgd(module))
    if case == "averaged":
        for _ in range(5):
            loss_optimizer.zero_grad()
            fabric.backward(loss_fn(model(x), labels))
            loss_fn.proxies.grad = fabric.all_reduce(loss_fn.proxies.grad)
            loss_optimizer.step()
    elif case == "set up":
        loss_fn, loss_optimizer = fabric.setup(loss_fn, loss_optimizer)
        fabric.backward(loss_fn(model(x), labels))
        loss_optimizer.step()
    elif case == "own model":  # on one rank only
        fabric.backward(model(x).sum())
        optimizer.step()
        if fabric.global_rank == 0:
            loss_fn(x, labels).backward()
            loss_optimizer.step()
    elif case == "copy":
        other = copy.deepcopy(model)
        fabric.backward(other(x).sum())
        sgd(other).step()
    elif case == "unused":
        fabric.backward(model(x).sum())
        loss_optimizer.step()
    elif case == "LBFGS":
        other = fabric.setup_module(net())
        lbfgs = fabric.setup_optimizers(torch.optim.LBFGS(other.parameters(), max_iter=2))

        def closure():
            lbfgs.zero_grad()
            loss = other(x).pow(2).mean()
            fabric.backward(loss)
            return loss

        lbfgs.step(closure)


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        *[(case, "ddp") for case in ("averaged", "set up", "own model", "copy", "unused", "LBFGS")],
        *[("raw optimizer", strategy) for strategy in ("ddp", "zero1", "fsdp")],
        *[(case, "fsdp") for case in ("averaged", "set up", "own model", "unused")],
    ],
)
def test_no_error(ranks, case, strategy):
    ranks.run(no_error, case, strategy, world_size=2)


def after_teardown(strategy: str) -> None:
    fabric, module = start(strategy), net()
    model, _ = fabric.setup(module, sgd(module))
    x, labels = batch(fabric)
    fabric.backward(nn.functional.cross_entropy(model(x), labels))
    fabric.strategy.teardown()
    other = net()
    for parameter in other.parameters():
        parameter.grad = torch.full_like(parameter, fabric.global_rank)
    sgd(other).step()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_a_strategy_that_was_torn_down_checks_no_step(ranks, strategy):
    ranks.run(after_teardown, strategy, world_size=2)
