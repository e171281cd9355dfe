"""The optimizer view: of the user's class, with the real one's data, and nothing of its own but the step."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from fabric import Fabric, is_wrapped
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.wrappers import _FabricOptimizer, unwrap

X = torch.ones(2, 4)


def fabric_on_cpu(**kwargs):
    return Fabric(accelerator="cpu", devices=1, **kwargs)


def ready(kind=Adam, fabric=None, **kwargs):
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    inner = kind(net.parameters(), **{"lr": 0.1, **kwargs})
    model, view = (fabric or fabric_on_cpu()).setup(net, inner)
    return model, view, inner


def train(model, view, steps=3):
    for _ in range(steps):
        model(X).pow(2).sum().backward()
        view.step()
        view.zero_grad()


class Counting(SGD):
    """A user's own: class attributes, methods, properties, attributes of its own."""

    flavour = "plain"
    limit = 1.0
    made = []

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.count = 0
        self.limit = 2.0

    def __init_subclass__(cls, **kwargs):
        Counting.made.append(cls)

    @property
    def double(self):
        return 2 * self.count

    @double.setter
    def double(self, value):
        self.count = value // 2

    def bump(self):
        self.count += 1
        return self

    def step(self, closure=None, extra=0):
        self.count += 1 + extra
        return super().step(closure)


# class and data


def test_it_is_an_instance_of_the_users_class():
    _, view, inner = ready()
    assert isinstance(view, Adam)
    assert isinstance(view, Optimizer)
    assert isinstance(view, _FabricOptimizer)
    assert is_wrapped(view)
    assert not is_wrapped(inner)
    assert unwrap(view) is view.optimizer is inner


def test_one_view_type_per_class():
    assert type(ready()[1]) is type(ready()[1])
    assert type(ready(Adam)[1]) is not type(ready(AdamW)[1])


def test_data_are_the_real_ones():
    model, view, inner = ready()
    train(model, view, 1)
    assert view.param_groups is inner.param_groups
    assert view.state is inner.state
    assert view.defaults is inner.defaults
    assert len(view.state) == 2
    assert repr(view) == repr(inner)
    assert {"param_groups", "state", "step", "optimizer"} <= set(dir(view))


def test_assigning_data_reaches_the_real_one():
    _, view, inner = ready()
    view.param_groups = groups = [dict(inner.param_groups[0])]
    view.state = state = {}
    assert inner.param_groups is groups
    assert inner.state is state


def test_add_param_group():
    _, view, inner = ready()
    extra = nn.Parameter(torch.ones(3))
    view.add_param_group({"params": [extra], "lr": 0.5})
    assert inner.param_groups[1]["params"] == [extra]
    assert inner.param_groups[1]["lr"] == 0.5


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    model, view, _ = ready()
    model(X).sum().backward()
    view.zero_grad(set_to_none=set_to_none)
    grads = [p.grad for p in model.parameters()]
    assert grads == [None, None] if set_to_none else all((g == 0).all() for g in grads)


def test_a_users_attributes():
    _, view, inner = ready(Counting)
    assert (view.flavour, view.limit, view.count) == ("plain", 2.0, 0)
    view.flavour = "sour"
    view.fresh = 1
    assert (inner.flavour, inner.fresh, Counting.flavour) == ("sour", 1, "plain")
    assert view.flavour == "sour"
    del view.fresh
    assert not hasattr(inner, "fresh")
    with pytest.raises(AttributeError, match="'Counting' object has no attribute 'nothing'"):
        _ = view.nothing


def test_a_users_methods_and_properties_run_on_the_real_one():
    _, view, inner = ready(Counting)
    assert view.bump() is inner
    view.double = 10
    assert inner.count == 5
    assert view.double == 10


def test_a_users_registry_of_classes_sees_no_views():
    ready(Counting)
    assert Counting.made == []


def test_a_method_replaced_on_the_real_one_is_used():
    _, view, inner = ready()
    inner.zero_grad = lambda set_to_none=True: "mine"
    assert view.zero_grad() == "mine"


# steps


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SGD, {"momentum": 0.9}),
        (Adam, {"foreach": True}),
        (AdamW, {"fused": True}),
        (AdamW, {"foreach": False}),
        (Counting, {}),
    ],
)
def test_steps_equal_the_plain_ones(kind, settings):
    model, view, _ = ready(kind, **settings)
    train(model, view)
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    plain = kind(net.parameters(), **{"lr": 0.1, **settings})
    train(net, plain)
    for ours, theirs in zip(model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_closures(precision):
    model, view, _ = ready(LBFGS, fabric_on_cpu(precision=precision))
    calls = []

    def closure():
        view.zero_grad()
        loss = model(X).pow(2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    assert view.step(closure).item() == calls[0]
    assert view.step(closure=closure).item() < calls[0]
    assert len(calls) > 2


def test_extra_arguments_of_a_users_step():
    model, view, inner = ready(Counting)
    model(X).sum().backward()
    view.step(extra=4)
    assert inner.count == 5


def test_a_users_closure_may_have_another_name():
    class Named(SGD):
        def step(self, loss_function=None):
            return super().step(loss_function)

    _, view, _ = ready(Named)
    assert view.step(lambda: 3) == 3


def test_hooks_of_torch():
    model, view, inner = ready()
    order = []
    view.register_step_pre_hook(lambda optimizer, *_: order.append(("pre", optimizer is inner)))
    inner.register_step_post_hook(lambda optimizer, *_: order.append(("post", optimizer is inner)))
    model(X).sum().backward()
    view.step()
    assert order == [("pre", True), ("post", True)]


class Watcher:
    def __init__(self):
        self.seen = []

    def on_after_optimizer_step(self, strategy, optimizer):
        self.seen.append((strategy, optimizer))


def test_callbacks_hear_of_each_step():
    watcher = Watcher()
    fabric = fabric_on_cpu(callbacks=[watcher, object()])
    model, view, inner = ready(fabric=fabric)
    train(model, view, 2)
    assert watcher.seen == [(fabric.strategy, inner)] * 2


# state


def test_state_dicts():
    model, view, inner = ready()
    train(model, view)
    state = copy.deepcopy(view.state_dict())
    assert state["param_groups"] == inner.state_dict()["param_groups"]
    _, other, real = ready()
    other.load_state_dict(state)
    assert len(real.state) == 2
    for mine, theirs in zip(real.state.values(), inner.state.values(), strict=True):
        torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=0, atol=0)


def test_state_dict_hooks():
    _, view, _ = ready()
    view.register_state_dict_post_hook(lambda optimizer, state: {**state, "mine": 1})
    assert view.state_dict()["mine"] == 1


def test_deepcopy():
    watcher = Watcher()
    model, view, inner = ready(fabric=fabric_on_cpu(callbacks=[watcher]))
    train(model, view, 1)
    twin_model, twin = copy.deepcopy((model, view))
    assert type(twin) is type(view)
    assert twin.optimizer is not inner
    assert twin.param_groups[0]["params"][0] is twin_model.weight
    before = model.weight.clone()
    train(twin_model, twin, 1)
    torch.testing.assert_close(model.weight, before, rtol=0, atol=0)
    assert not torch.equal(twin_model.weight, before)
    assert len(watcher.seen) == 2


def test_pickle():
    model, view, _ = ready()
    train(model, view, 1)
    twin = pickle.loads(pickle.dumps(view))
    assert isinstance(twin, Adam)
    assert repr(twin) == repr(view)
    assert len(twin.state) == 2
    twin.step()


# schedulers


SCHEDULERS = {
    "StepLR": lambda o: StepLR(o, step_size=4, gamma=0.5),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=1.0, total_steps=20),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=1),
}


def trace(optimizer, scheduler, model, backward):
    rates = []
    for step in range(12):
        optimizer.zero_grad()
        backward(model(X).pow(2).mean())
        optimizer.step()
        scheduler.step(*([1.0 + step] if isinstance(scheduler, ReduceLROnPlateau) else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def plain_trace(name):
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = SGD(net.parameters(), lr=0.1)
    return trace(optimizer, SCHEDULERS[name](optimizer), net, torch.Tensor.backward)


def fabric_trace(name, when, **kwargs):
    fabric = Fabric(accelerator="cpu", **kwargs)
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    inner = SGD(net.parameters(), lr=0.1)
    early = SCHEDULERS[name](inner) if when == "before setup" else None
    model, view = fabric.setup(net, inner)
    scheduler = early or SCHEDULERS[name](inner if when == "on the real one" else view)
    return trace(view, scheduler, model, fabric.backward)


WHEN = ["before setup", "after setup", "on the real one"]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_schedulers(name, when, precision):
    """Warnings are errors here: none says that the scheduler was stepped before the optimizer."""
    assert fabric_trace(name, when, devices=1, precision=precision) == plain_trace(name)


def all_traces():
    return {
        (name, when): fabric_trace(name, when, devices=2, strategy="ddp")
        for name in SCHEDULERS
        for when in WHEN
    }


def test_schedulers_do_not_depend_on_the_number_of_ranks(ranks):
    for found in ranks.run(all_traces, world_size=2):
        for (name, when), rates in found.items():
            assert rates == plain_trace(name), (name, when)


def test_a_scheduler_given_to_setup_comes_back_untouched():
    net = nn.Linear(4, 2)
    inner = SGD(net.parameters(), lr=0.1)
    scheduler = StepLR(inner, 4)
    _, _, same = fabric_on_cpu().setup(net, inner, scheduler=scheduler)
    assert same is scheduler
    assert scheduler.optimizer is inner


# bad input


def test_setup_refuses_a_scheduler_as_optimizer():
    net = nn.Linear(4, 2)
    scheduler = StepLR(SGD(net.parameters(), lr=0.1), 4)
    with pytest.raises(ArgumentTypeError, match=r"got StepLR\. Schedulers need no setup: keep using yours"):
        fabric_on_cpu().setup(net, scheduler)
    with pytest.raises(ArgumentTypeError, match=r"got StepLR\. Schedulers need no setup: keep using yours"):
        fabric_on_cpu().setup_optimizers(scheduler)


def test_setup_refuses_what_is_no_optimizer():
    with pytest.raises(
        ArgumentTypeError, match=re.escape("fabric.setup needs torch's Optimizer, but got float.")
    ):
        fabric_on_cpu().setup(nn.Linear(4, 2), 0.1)


def test_setup_refuses_the_same_optimizer_twice():
    net = nn.Linear(4, 2)
    optimizer = SGD(net.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="the same optimizer was passed twice"):
        fabric_on_cpu().setup(net, optimizer, optimizer)


def test_setup_refuses_an_optimizer_that_is_set_up():
    fabric = fabric_on_cpu()
    _, view, _ = ready(fabric=fabric)
    with pytest.raises(ConfigurationError, match="this Adam is set up already"):
        fabric.setup_optimizers(view)
    with pytest.raises(ConfigurationError, match="this Adam is set up already"):
        fabric.setup(nn.Linear(4, 2), view)


def test_setup_refuses_parameters_of_no_model():
    fabric = fabric_on_cpu()
    net, foreign = nn.Linear(4, 2), nn.Linear(3, 1)
    optimizer = SGD([*net.parameters(), *foreign.parameters()], lr=0.1)
    with pytest.raises(ConfigurationError) as caught:
        fabric.setup(net, optimizer)
    text = str(caught.value)
    assert "fabric.setup: 2 of 4 parameters of SGD (shapes (1, 3), (1,)) belong to no model" in text
    assert "Make the optimizer from this model's .parameters()" in text
    assert "fabric.setup_optimizers(optimizer), which also takes other parameters." in text
    assert not is_wrapped(net)


def test_setup_optimizers_needs_one():
    with pytest.raises(ConfigurationError, match="needs at least one Optimizer"):
        fabric_on_cpu().setup_optimizers()


def test_an_optimizer_over_two_models():
    fabric = fabric_on_cpu()
    one, two = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer = SGD([*one.parameters(), *two.parameters()], lr=0.1)
    one, two = fabric.setup_module(one), fabric.setup_module(two)
    view = fabric.setup_optimizers(optimizer)
    fabric.backward(two(one(X)).sum())
    view.step()
    assert view.optimizer is optimizer
