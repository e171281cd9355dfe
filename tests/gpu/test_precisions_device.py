"""Every precision against the same casts in plain torch; float16's loss scale. Skipped without a device."""

import warnings
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from accelerated import DEVICE, KIND
from torch import nn

from fabric import Fabric

pytestmark = pytest.mark.gpu

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CASTS = {  # dtype of parameters, dtype of autocast
    "64-true": (F64, None),
    "32-true": (F32, None),
    "16-true": (F16, None),
    "bf16-true": (BF16, None),
    "16-mixed": (F32, F16),
    "bf16-mixed": (F32, BF16),
}
STEPS, SPIKE = 6, 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


def batches() -> list[torch.Tensor]:
    data = torch.randn(STEPS, 48, 32, generator=torch.Generator().manual_seed(1))
    data[SPIKE] *= 3e3  # squares of it leave the range of float16
    return list(data)


def train(precision: str, data: list[torch.Tensor]) -> tuple[list[float], list[torch.Tensor], float | None]:
    fabric = Fabric(accelerator=KIND, devices=1, precision=precision)
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = model(fabric.to_device(x)).float().pow(2).mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    return losses, [p.detach() for p in model.parameters()], scaler and scaler.get_scale()


def train_plain(
    precision: str, data: list[torch.Tensor]
) -> tuple[list[float], list[torch.Tensor], float | None]:
    dtype, compute = CASTS[precision]
    model = net().to(DEVICE, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(KIND, enabled=precision == "16-mixed")
    losses = []
    for x in data:
        optimizer.zero_grad()
        with torch.autocast(KIND, compute) if compute else nullcontext():
            out = model(x.to(DEVICE, dtype))
        loss = out.float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return (
        losses,
        [p.detach() for p in model.parameters()],
        scaler.get_scale() if scaler.is_enabled() else None,
    )


@pytest.mark.parametrize("precision", CASTS)
def test_training_equals_the_same_casts_in_plain_torch(precision):
    data = batches()
    if precision != "16-mixed":
        del data[SPIKE]  # which only a loss scaler survives
    losses, parameters, scale = train(precision, data)
    expected_losses, expected, expected_scale = train_plain(precision, data)
    assert [p.dtype for p in parameters] == [CASTS[precision][0]] * 4
    tolerance = 1e-5 if precision in ("64-true", "32-true") else 1e-3
    torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(parameters, expected, rtol=tolerance, atol=tolerance)
    assert scale == expected_scale
    assert losses[-1] < 0.9 * losses[0]


def test_a_gradient_that_overflows_float16_skips_the_step_and_halves_the_scale():
    fabric = Fabric(accelerator=KIND, devices=1, precision="16-mixed")
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    scaler = fabric.strategy.precision.scaler
    changed, scale = [], scaler.get_scale()
    for x in batches():
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        fabric.backward(model(fabric.to_device(x)).pow(2).mean())
        optimizer.step()
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    assert changed == [number != SPIKE for number in range(STEPS)]
    assert scaler.get_scale() == scale / 2


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_float8_equals_torchao_by_hand():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        data = batches()
        del data[SPIKE]
        losses, parameters, _ = train("float8", data)
        native = KIND == "cuda" and torch.cuda.get_device_capability(DEVICE) >= (8, 9)
        model = convert_to_float8_training(net().to(DEVICE), config=Float8LinearConfig(emulate=not native))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for x, loss in zip(data, losses, strict=True):
            optimizer.zero_grad()
            expected = model(x.to(DEVICE)).pow(2).mean()
            expected.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert loss == pytest.approx(expected.item(), rel=1e-3)
    for got, want in zip(parameters, model.parameters(), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-3, atol=1e-3)
