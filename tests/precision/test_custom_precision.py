"""A user's own Precision: each method that it overrides takes effect, and only those."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.core.errors import ConfigurationError, UsageError
from fabric.plugins.precision import FSDPPrecision, MixedPrecision, Precision

X = torch.ones(2, 4)


def ready(precision, **kwargs):
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=precision, **kwargs)
    net = nn.Linear(4, 2)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    return fabric, model, optimizer


def base(kind):
    return kind() if kind is Precision else kind("bf16-mixed", "cpu")


KINDS = pytest.mark.parametrize("kind", [Precision, MixedPrecision])


def made(kind, **methods):
    own = type("Own", (kind,), methods)
    return own() if kind is Precision else own("bf16-mixed", "cpu")


@KINDS
def test_convert_module(kind):
    _, model, _ = ready(made(kind, convert_module=lambda self, module: module.double()))
    assert model.weight.dtype is torch.float64


@KINDS
def test_convert_input_and_output(kind):
    precision = made(
        kind,
        convert_input=lambda self, data: ((data[0][0] * 0,), data[1]),
        convert_output=lambda self, data: data.float() + 100,
    )
    _, model, _ = ready(precision)
    torch.testing.assert_close(model(X), model.bias.expand(2, 2) + 100, rtol=1e-2, atol=1e-2)


@KINDS
def test_forward_context(kind):
    entered = []

    @contextmanager
    def forward_context(self):
        entered.append("in")
        yield
        entered.append("out")

    fabric, model, _ = ready(made(kind, forward_context=forward_context))
    model(X)
    with fabric.autocast():
        pass
    assert entered == ["in", "out"] * 2


@KINDS
def test_backward(kind):
    def backward(self, tensor, model, *args, **kwargs):
        (tensor * 10).backward(*args, **kwargs)

    fabric, model, _ = ready(made(kind, backward=backward))
    fabric.backward(model(X).sum(), retain_graph=True)
    assert model.bias.grad.tolist() == [20.0, 20.0]
    with pytest.raises(UsageError, match=r"Write fabric\.backward"):
        model(X).sum().backward()


@KINDS
def test_pre_and_post_backward(kind):
    calls = []

    def pre_backward(self, tensor, module):
        calls.append("pre")
        return tensor * 3

    def post_backward(self, tensor, module):
        calls.append(("post", tensor.item() != 0))

    fabric, model, _ = ready(made(kind, pre_backward=pre_backward, post_backward=post_backward))
    fabric.backward(model(X).sum())
    assert model.bias.grad.tolist() == [6.0, 6.0]
    assert calls == ["pre", ("post", True)]


@KINDS
def test_optimizer_step(kind):
    def optimizer_step(self, optimizer, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return optimizer.step(**kwargs) or "mine"

    fabric, model, optimizer = ready(made(kind, optimizer_step=optimizer_step))
    before = model.weight.clone()
    fabric.backward(model(X).sum())
    assert optimizer.step() == "mine"
    assert optimizer.step(lambda: 5) == 5
    assert torch.equal(before, model.weight)


@KINDS
def test_main_params_are_what_is_clipped(kind):
    def main_params(self, optimizer):
        yield optimizer.param_groups[0]["params"][1]

    fabric, model, optimizer = ready(made(kind, main_params=main_params))
    fabric.backward(model(X).sum())
    fabric.clip_gradients(model, optimizer, clip_val=0.5)
    assert model.bias.grad.tolist() == [0.5, 0.5]
    assert (model.weight.grad == 2).all()


@KINDS
def test_unscale_gradients(kind):
    calls = []
    fabric, model, optimizer = ready(made(kind, unscale_gradients=lambda self, o: calls.append(o)))
    fabric.backward(model(X).sum())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert calls == [optimizer.optimizer]


@KINDS
def test_state_is_saved_with_the_rest(kind, tmp_path):
    def load_state_dict(self, state):
        self.loaded = state

    precision = made(kind, state_dict=lambda self: {"seen": 3}, load_state_dict=load_state_dict)
    fabric, _, _ = ready(precision)
    fabric.save(tmp_path / "x.pt", {"precision": fabric.strategy.precision})
    fabric.load(tmp_path / "x.pt", {"precision": fabric.strategy.precision})
    assert precision.loaded == {"seen": 3}


def test_nothing_overridden_is_plain():
    fabric, model, optimizer = ready(made(Precision))
    assert not fabric.strategy.precision.needs_backward
    assert not fabric.strategy.precision.needs_step
    model(X).sum().backward()
    optimizer.step()


def test_a_precision_of_a_strategy():
    from fabric.strategies import SingleDeviceStrategy

    fabric = Fabric(strategy=SingleDeviceStrategy(precision=base(MixedPrecision)), accelerator="cpu")
    assert fabric.strategy.precision.precision == "bf16-mixed"
    model = fabric.setup(nn.Linear(4, 2))
    assert model(X).dtype is torch.float32


@pytest.mark.parametrize(("name", "kind"), [("bf16-true", "HalfPrecision"), ("bf16", "MixedPrecision")])
def test_the_precision_of_fsdp_by_its_own_name(name, kind):
    for plugin in (FSDPPrecision(name), FSDPPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu"))):
        strategy = Fabric(accelerator="cpu", devices=1, plugins=plugin).strategy
        assert isinstance(plugin, Precision)
        assert type(strategy.precision).__name__ == (kind if plugin.scaler is None else "MixedPrecision")
        assert strategy.precision.precision == plugin.precision
        assert getattr(strategy.precision, "scaler", None) is plugin.scaler
    assert FSDPPrecision("bf16-mixed").mixed_precision_config.param_dtype is torch.bfloat16
    with pytest.raises(ConfigurationError, match="is not known"):
        FSDPPrecision("bf17")
