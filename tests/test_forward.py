"""Forward plans: what each adds, and that it takes it back whatever happens."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.core.traits import overridden
from fabric.forward import GuardedForward, differentiable
from fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from fabric.precision.dtypes import CastTo
from fabric.strategies.precise_forward import AutocastForward, CastForward, PluginForward, precision_plan
from fabric.strategies.strategy import BackwardGate

X = torch.ones(2, 4)
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Batch:
    x: torch.Tensor
    index: torch.Tensor
    name: str = "batch"


def echo(*args, **kwargs):
    return args, kwargs


def add(x):
    return x + 1


# casting


def test_casting_leaves_all_but_floats():
    index, text = torch.tensor([1]), "text"
    tree = {"a": [X.double(), index], "b": Pair(X, text), "c": Batch(X.half(), index), "d": (True, None, 1.5)}
    cast = CastTo(torch.bfloat16)(tree)
    assert cast["a"][0].dtype is cast["b"].left.dtype is cast["c"].x.dtype is torch.bfloat16
    assert cast["a"][1] is index
    assert cast["c"].index is index
    assert type(cast["b"]) is Pair
    assert cast["b"].right is text
    assert cast["c"].name == "batch"
    assert cast["d"] == (True, None, 1.5)
    assert tree["a"][0].dtype is torch.float64
    assert tree["c"].x.dtype is torch.float16


@pytest.mark.parametrize(
    "tree", [X, [X, [X]], {"cache": []}, OrderedDict(a=X), Batch(X, torch.tensor(1)), None, 3]
)
def test_what_needs_no_cast_is_not_rebuilt(tree):
    """A forward may write into a cache that it was given."""
    assert CastTo(torch.float32)(tree) is tree


def test_none_means_the_default_dtype_at_call_time():
    cast = CastTo(None)
    assert cast(X.double()).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert cast(X).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_casting_keeps_gradients():
    x = X.double().requires_grad_()
    CastTo(torch.float32)([x])[0].sum().backward()
    assert x.grad.dtype is torch.float64


# plans


def test_autocast_plan():
    states = []

    def call(*args, **kwargs):
        states.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return args, kwargs

    index = torch.tensor([1])
    plan = AutocastForward(call, "cpu", torch.bfloat16, torch.float32)
    args, kwargs = plan(X.double(), {"x": X.half(), "i": index}, flag=True, y=[X.double()])
    assert states == [(True, torch.bfloat16)]
    assert args[0].dtype is args[1]["x"].dtype is kwargs["y"][0].dtype is torch.float32
    assert args[1]["i"] is index
    assert kwargs["flag"] is True
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("output", "expected"), [(torch.float32, torch.float32), (None, torch.bfloat16)])
def test_autocast_output(output, expected):
    net = nn.Linear(4, 2)
    assert AutocastForward(net, "cpu", torch.bfloat16, output)(X).dtype is expected


@pytest.mark.parametrize(
    "plan",
    [
        lambda call: AutocastForward(call, "cpu", torch.bfloat16, torch.float32),
        lambda call: CastForward(call, torch.bfloat16, None),
    ],
)
def test_the_callers_cache_is_written(plan):
    def call(x, cache):
        cache["seen"].append(x)
        return x

    cache = {"seen": []}
    plan(call)(X, cache=cache)
    plan(call)(X, cache)
    assert len(cache["seen"]) == 2


def test_cast_plan():
    def call(x, index):
        return {"made": torch.ones(1), "x": x, "index": index}

    out = CastForward(call, torch.bfloat16, torch.float64)(X, torch.tensor([1]))
    assert out["made"].dtype is out["x"].dtype is torch.float64
    assert out["index"].dtype is torch.int64
    seen = []
    CastForward(lambda: seen.append(torch.ones(1).dtype), torch.bfloat16, None)()
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("precision", ["64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"])
def test_nothing_is_left_set_after_an_exception(precision):
    class Bad(nn.Linear):
        def forward(self, x):
            raise ValueError("inside")

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model = fabric.setup(Bad(4, 2))
    for block in (fabric.autocast, fabric.init_tensor, fabric.init_module):
        with pytest.raises(ValueError, match="inside"), block():
            raise ValueError("inside")
    with pytest.raises(ValueError, match="inside"):
        model(X)
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")


class Recorder(Precision):
    def __init__(self):
        self.events = []

    def convert_input(self, data):
        self.events.append("input")
        return data

    @contextmanager
    def forward_context(self):
        self.events.append("enter")
        yield
        self.events.append("exit")

    def convert_output(self, data):
        self.events.append("output")
        return data


def test_plugin_plan():
    recorder = Recorder()
    assert PluginForward(add, recorder)(X).equal(X + 1)
    assert recorder.events == ["input", "enter", "exit", "output"]


class OnlyOutput(MixedPrecision):
    def convert_output(self, data):
        return data


class OnlyInput(HalfPrecision):
    def convert_input(self, data):
        return data


class Unchanged(MixedPrecision):
    pass


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        (MixedPrecision("bf16-mixed", "cpu"), AutocastForward),
        (Unchanged("bf16-mixed", "cpu"), AutocastForward),
        (HalfPrecision("bf16-true"), CastForward),
        (DoublePrecision(), CastForward),
        (Recorder(), PluginForward),
        (OnlyOutput("bf16-mixed", "cpu"), PluginForward),
        (OnlyInput("bf16-true"), PluginForward),
    ],
)
def test_the_plan_of_a_precision(precision, kind):
    assert type(precision_plan(precision, add)) is kind


def test_overridden():
    assert overridden(OnlyOutput, MixedPrecision, "convert_output")
    assert not overridden(OnlyOutput, MixedPrecision, "convert_input", "forward_context")


@pytest.mark.parametrize(
    "plan",
    [
        lambda call: AutocastForward(call, "cpu", torch.bfloat16, torch.float32),
        lambda call: CastForward(call, torch.float32, torch.float32),
        lambda call: GuardedForward(call, BackwardGate()),
        lambda call: PluginForward(call, DoublePrecision()),
    ],
)
def test_plans_copy_and_pickle(plan):
    net = nn.Linear(4, 2)
    for twin in (copy.deepcopy(plan(net.__call__)), pickle.loads(pickle.dumps(plan(net.__call__)))):
        inner = twin.call.__self__
        assert inner is not net
        if type(twin) is not PluginForward:
            assert twin(X).shape == (2, 2)


@pytest.mark.parametrize("change", [lambda out: out, lambda out: out.add_(1), lambda out: out[0].zero_()])
def test_a_guarded_output_that_is_changed_in_place_stays_guarded(change):
    net = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0, 1))
    out = GuardedForward(net.__call__, BackwardGate())(torch.ones(2, 3, 4))
    assert out._base is not None
    change(out)
    with pytest.raises(UsageError, match=r"fabric\.backward"):
        out.sum().backward()


def test_copies_share_the_plugin_and_the_gate():
    recorder, gate = Recorder(), BackwardGate()
    assert copy.deepcopy(PluginForward(add, recorder)).precision is recorder
    assert copy.deepcopy(GuardedForward(add, gate)).gate is gate


# the guard


def guarded(kind=nn.Linear):
    fabric = Fabric(accelerator="cpu", devices=1, precision="16-mixed")
    return fabric, fabric.setup(kind(4, 2))


def test_differentiable():
    parameter = nn.Parameter(X)
    assert differentiable({"a": [parameter, X], "b": 1}) == [parameter]


class Many(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return {"one": [out.sum()], "index": torch.tensor(1), "other": Batch(out, torch.tensor(0))}


PLAIN = "loss.backward\\(\\) was called where it gives wrong gradients.*Write fabric.backward\\(loss\\)"


def test_plain_backward_raises():
    _, model = guarded()
    with pytest.raises(UsageError, match=PLAIN):
        model(X).sum().backward()
    with pytest.raises(UsageError, match=PLAIN):
        torch.autograd.backward([model(X).sum()])
    with pytest.raises(UsageError, match=PLAIN):
        model(X).sum().backward(inputs=[model.weight])
    assert model.weight.grad is None


def test_plain_backward_raises_for_any_output_of_a_tree():
    fabric, model = guarded(Many)
    for pick in (lambda out: out["one"][0], lambda out: out["other"].x.sum()):
        with pytest.raises(UsageError, match=PLAIN):
            pick(model(X)).backward()
    out = model(X)
    fabric.backward(out["one"][0] + out["other"].x.sum())


def test_the_gate_closes_after_a_failed_backward():
    fabric, model = guarded()
    with pytest.raises(RuntimeError, match="A backward starts from one number"):
        fabric.backward(model(X))
    with pytest.raises(UsageError, match=PLAIN):
        model(X).sum().backward()


def test_autograd_grad_is_left_alone():
    """A gradient penalty: gradients for an input, or for the parameters, that are no `.grad`."""
    fabric, model = guarded()
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert slope.dtype is torch.float32
    assert len(torch.autograd.grad(model(x).sum(), list(model.parameters()))) == 2
    model(x).sum().backward(inputs=[x])
    fabric.backward(model(x).sum() + (slope.norm() - 1).pow(2))
    assert model.weight.grad is not None


def test_no_hooks_without_gradients():
    _, model = guarded()
    with torch.no_grad():
        assert model(X)._backward_hooks is None
    assert model(X)._backward_hooks


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-true", "bf16-true", "64-true"])
def test_plain_backward_is_right_and_allowed_elsewhere(precision):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    one, other = fabric.setup(nn.Linear(4, 2)), fabric.setup(nn.Linear(4, 2))
    other.load_state_dict(one.state_dict())
    one(X).sum().backward()
    fabric.backward(other(X).sum())
    torch.testing.assert_close(one.weight.grad, other.weight.grad, rtol=0, atol=0)
