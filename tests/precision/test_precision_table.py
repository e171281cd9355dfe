"""The table of precisions, row by row: which dtype each part of a training step has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.core.precision import POLICIES, parse_precision
from fabric.plugins.precision import (
    PRECISION_REGISTRY,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from fabric.precision.precision import make_precision

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
X = torch.ones(2, 4)

# parameters, product inside forward, tensor made inside forward, outputs, gradients, loss scaling
TABLE = {
    "64-true": (F64, F64, F64, F32, F64, False),
    "32-true": (F32, F32, F32, F32, F32, False),
    "16-true": (F16, F16, F16, F32, F16, False),
    "bf16-true": (BF16, BF16, BF16, F32, BF16, False),
    "16-mixed": (F32, F16, F32, F32, F32, True),
    "bf16-mixed": (F32, BF16, F32, F32, F32, False),
}
ALIASES = {
    64: "64-true",
    "64": "64-true",
    32: "32-true",
    "32": "32-true",
    16: "16-mixed",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    None: "32-true",
}
PLUGINS = {
    "64-true": DoublePrecision,
    "32-true": Precision,
    "16-true": HalfPrecision,
    "bf16-true": HalfPrecision,
    "16-mixed": MixedPrecision,
    "bf16-mixed": MixedPrecision,
}


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen = {}

    def forward(self, x, index):
        out = self.body(x)
        self.seen = {
            "input": x.dtype,
            "compute": out.dtype,
            "made": torch.ones(1).dtype,
            "index": index.dtype,
        }
        return {"out": out, "index": index, "flag": True}


def on_cpu(precision, **kwargs):
    fabric = Fabric(accelerator="cpu", **{"devices": 1, **kwargs}, precision=precision)
    fabric.launch()
    return fabric


def measure(precision, **kwargs):
    fabric = on_cpu(precision, **kwargs)
    net = Probe()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    rows = []
    for given in (F32, F64, F16):
        out = model(X.to(given), torch.tensor([1, 2]))
        fabric.backward(out["out"].sum())
        optimizer.step()
        assert (net.seen["index"], out["index"].dtype, out["flag"]) == (torch.int64, torch.int64, True)
        assert net.count.dtype is torch.int64
        assert net.scale.dtype is net.body.weight.dtype
        rows.append(
            (
                net.body.weight.dtype,
                net.seen["compute"],
                net.seen["made"],
                out["out"].dtype,
                net.body.weight.grad.dtype,
                getattr(fabric.strategy.precision, "scaler", None) is not None,
            )
        )
        optimizer.zero_grad()
    assert torch.get_default_dtype() is F32
    return rows


@pytest.mark.parametrize("precision", [name for name in TABLE if name != "32-true"])
def test_each_row_whatever_the_inputs_dtype(precision):
    assert measure(precision) == [TABLE[precision]] * 3


def test_the_row_of_32_true_leaves_inputs_as_they_are():
    fabric = on_cpu("32-true")
    model = fabric.setup(Probe())
    out = model(X, torch.tensor([1]))
    fabric.backward(out["out"].sum())
    found = (model.body.weight.dtype, *[model.seen[k] for k in ("compute", "made")], out["out"].dtype)
    assert (*found, model.body.weight.grad.dtype, False) == TABLE["32-true"]
    same = Precision().convert_input(x := X.double())
    assert same is x


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases(alias, name):
    precision = on_cpu(alias).strategy.precision
    assert (precision.precision, type(precision)) == (name, PLUGINS[name])
    assert precision.policy is POLICIES[name]


@pytest.mark.parametrize("name", TABLE)
def test_the_policy_says_the_same(name):
    policy = parse_precision(name)
    param, compute, _, output, _, scaled = TABLE[name]
    assert (policy.param or F32, policy.compute, policy.output or F32, policy.loss_scale) == (
        param,
        compute,
        output,
        scaled,
    )
    assert type(make_precision(name, "cpu")) is PLUGINS[name]
    assert name in PRECISION_REGISTRY


def measured_with_ddp(precision):
    return measure(precision, devices=2, strategy="ddp")


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true", "64-true"])
def test_rows_under_ddp(ranks, precision):
    assert ranks.run(measured_with_ddp, precision, world_size=2) == [[TABLE[precision]] * 3] * 2


# where modules and tensors are made


@pytest.mark.parametrize("precision", TABLE)
def test_init_contexts(precision):
    fabric = on_cpu(precision)
    expected = TABLE[precision][0]
    with fabric.init_module():
        assert nn.Linear(2, 2).weight.dtype is expected
    with fabric.init_tensor():
        assert torch.ones(1).dtype is expected
        assert torch.tensor([1]).dtype is torch.int64
    assert torch.ones(1).dtype is F32


@pytest.mark.parametrize(("precision", "product"), [(name, row[1]) for name, row in TABLE.items()])
def test_autocast_context(precision, product):
    fabric = on_cpu(precision)
    x = torch.ones(2, 2, dtype=TABLE[precision][0])
    with fabric.autocast():
        assert (x @ x).dtype is product
    assert not torch.is_autocast_enabled("cpu")


def test_a_context_is_used_twice_and_nested():
    fabric = on_cpu("bf16-true")
    with fabric.init_tensor(), fabric.init_module():
        assert torch.ones(1).dtype is BF16
    precision = fabric.strategy.precision
    context = precision.forward_context()
    with context:
        with context:
            assert torch.get_default_dtype() is BF16
        assert torch.get_default_dtype() is BF16
    assert torch.get_default_dtype() is F32


# the output's dtype is a setting


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        (lambda: MixedPrecision("bf16-mixed", "cpu", output_dtype=None), BF16),
        (lambda: MixedPrecision("bf16-mixed", "cpu", output_dtype=F64), F64),
        (lambda: MixedPrecision("16-mixed", "cpu", output_dtype=None), F16),
        (lambda: HalfPrecision("bf16-true", output_dtype=BF16), BF16),
        (lambda: HalfPrecision("16-true", output_dtype=F16), F16),
        (lambda: DoublePrecision(output_dtype=F64), F64),
        (DoublePrecision, F32),
    ],
)
def test_output_dtype(plugin, expected):
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin())
    assert fabric.setup(nn.Linear(4, 2))(X).dtype is expected


def test_true_precision_outputs_follow_the_default_dtype():
    model = on_cpu("bf16-true").setup(nn.Linear(4, 2))
    torch.set_default_dtype(F64)
    try:
        assert model(X).dtype is F64
    finally:
        torch.set_default_dtype(F32)


# bad input


@pytest.mark.parametrize("value", ["float16", 8, "32-mixed", True, 16.0, "", "BF16"])
def test_unknown_precision_shows_the_choices(value):
    with pytest.raises(ConfigurationError) as caught:
        on_cpu(value)
    text = str(caught.value)
    assert f"precision={value!r}" in text
    for name in TABLE:
        assert repr(name) in text or name in text


def test_precision_given_twice():
    with pytest.raises(ConfigurationError) as caught:
        Fabric(accelerator="cpu", precision="bf16-mixed", plugins=HalfPrecision())
    assert str(caught.value) == (
        "The precision is given twice: by precision='bf16-mixed' and by plugins=HalfPrecision. "
        "Keep one of the two."
    )
    with pytest.raises(ConfigurationError, match="Precision"):
        Fabric(accelerator="cpu", plugins=[HalfPrecision(), DoublePrecision()])


def test_names_that_a_plugin_does_not_have():
    with pytest.raises(ConfigurationError) as caught:
        HalfPrecision("32")
    assert str(caught.value) == (
        "HalfPrecision(precision='32') is not one of '16-true', 'bf16-true'. "
        "Write Fabric(precision='32'), which chooses the plugin."
    )
    with pytest.raises(
        ConfigurationError, match=r"MixedPrecision\(precision='16'\) is not one of '16-mixed', 'bf16-mixed'"
    ):
        MixedPrecision("16", "cpu")


def test_a_scaler_with_bf16():
    with pytest.raises(
        ConfigurationError, match=r"(?s)A scaler was given with precision='bf16-mixed', which needs none"
    ):
        MixedPrecision("bf16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
