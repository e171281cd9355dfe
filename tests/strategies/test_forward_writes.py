"""Forwards that write parameters: an error where FSDP2 would lose the change, and right elsewhere."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.torch_versions import older_than

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


class Momentum(nn.Module):
    """A key encoder that follows the query encoder, as in MoCo and BYOL."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    @torch.no_grad()
    def update(self):
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            if self.how == "data":
                key.data = key.data * 0.5 + query.data * 0.5
            elif self.how == "copy":
                key.data.mul_(0.5).add_(query.data, alpha=0.5)
            else:
                key.lerp_(query, 0.5)

    def forward(self, x):
        if self.how != "outside":
            self.update()
        return torch.cat([self.query(x) - self.key(x), self.query(x)], 1)


class MaxNorm(nn.Linear):
    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


def trained(model, wrap=None, update=None):
    torch.manual_seed(1)
    model = model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    x = X
    if wrap is not None:
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=wrap)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        x = X[fabric.global_rank :: fabric.world_size]
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward() if wrap is None else fabric.backward(loss)
        optimizer.step()
        if update:
            (model if wrap is None else model.module).update()
    return model.state_dict() if wrap is None else fabric.strategy.get_module_state_dict(model.module)


def makers(kind):
    return (lambda: MaxNorm(4, 4)) if kind == "renorm" else (lambda: Momentum(kind))


def refused(kind, strategy):
    name = "weight" if kind == "renorm" else "key.weight"
    with pytest.raises(UsageError, match=rf"The forward of .* wrote into {name}\. .*a gathered copy"):
        trained(makers(kind), strategy)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
@pytest.mark.parametrize("kind", ["data", "copy", "lerp", "renorm"])
def test_a_write_that_would_be_lost_is_refused(ranks, kind, strategy, world):
    ranks.run(refused, kind, strategy, world_size=world)


def equal(kind, strategy, update):
    make = makers(kind)
    expected, found = trained(make, update=update), trained(make, strategy, update)
    for name, value in expected.items():
        if name in found:  # rank zero has all of it
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("kind", ["data", "copy", "lerp", "renorm"])
def test_it_is_right_where_parameters_are_whole(ranks, kind, strategy):
    ranks.run(equal, kind, strategy, False, world_size=2)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_the_same_write_after_the_step_is_right(ranks, strategy):
    ranks.run(equal, "outside", strategy, True, world_size=2)


class Quantised(nn.Module):
    """Frozen integers, as quantised layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.arange(16, dtype=torch.uint8).view(4, 4), requires_grad=False)

    def forward(self, x):
        return self.layer(x) @ self.codes.float()


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_frozen_integers_are_no_hindrance(ranks, strategy):
    for refused in ranks.run(equal_of, Quantised, strategy, world_size=2):
        if refused:  # by older versions of torch
            assert older_than("2.13")
            assert re.match(r"Quantised has parameters of integers \(codes\), .* Use torch 2.13", refused)


def equal_of(make, strategy):
    """Returns the text of the error of a strategy that refuses the model."""
    expected = trained(make)
    try:
        found = trained(make, strategy)
    except ConfigurationError as error:
        return str(error)
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)
    return ""


def after_an_error():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp")
    fabric.launch()
    model = fabric.setup(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5))
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    with torch.no_grad():
        model.eval()(X)
    model.train()(X)


def test_a_forward_that_failed_is_not_compared(ranks):
    ranks.run(after_an_error, world_size=2)


class Initialised(nn.Module):
    """A layer whose first forward sets its parameter from the batch, as ActNorm of normalising flows."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.done = nn.Parameter(torch.zeros(4)), False

    def forward(self, x):
        if not self.done:
            self.done = True
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
        return x + self.shift


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Initialised(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x))

    def log_prob(self, x):
        return -self.last(self.first(x)).square().sum(1)


def first_call(call, strategy, grad):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = fabric.setup(Flow())
    if call == "marked":
        model.mark_forward_method("log_prob")
    calls = {"forward": model, "evaluation": model.eval(), "layer": model.first}
    model.train(call != "evaluation")
    with torch.set_grad_enabled(grad):
        calls.get(call, model.log_prob)(X)


def refused_call(call, strategy, grad):
    what = "The method log_prob" if call in ("marked", "method") else "The forward"
    with pytest.raises(UsageError, match=rf"^{what} of model 0 \(Flow\) wrote into first.shift\. .* copy"):
        first_call(call, strategy, grad)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
@pytest.mark.parametrize("call", ["forward", "evaluation", "layer", "method", "marked"])
def test_a_first_call_that_writes_is_refused(ranks, call, strategy, grad):
    if call == "evaluation" and grad:
        pytest.skip("only evaluations without gradients are compared")
    ranks.run(refused_call, call, strategy, grad, world_size=2)


def calls_and_writes():
    """Each call of a model that writes nothing, and writes between calls."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp")
    fabric.launch()
    module = Flow()
    module.first.done = True
    model = fabric.setup(module)
    for grad in (False, True, False, True):
        with torch.set_grad_enabled(grad):
            for call in (model, model.first, model.last, model.log_prob):
                call(X)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def test_calls_that_write_nothing_are_no_error(ranks):
    ranks.run(calls_and_writes, world_size=2)
