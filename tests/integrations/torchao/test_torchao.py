"""TorchAOPrecision with the real package: float8 training under every strategy, weights in int8."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.plugins.precision import TorchAOPrecision


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def batch(step, rank):
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def launched(strategy="ddp", **settings):
    # torchao registers enums in a way that torch 2.13 calls deprecated
    warnings.filterwarnings("ignore", "<enum .*|.*register_constant.*|.*Enum subclass.*")
    count = dist.get_world_size() if dist.is_initialized() else 1
    strategy = strategy if count > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=count, strategy=strategy, **settings)
    fabric.launch()
    return fabric


def train(fabric, model, optimizer, steps=4):
    losses = []
    for step in range(steps):
        parts = [fabric.global_rank] if fabric.world_size > 1 else [0, 1]
        x = torch.cat([batch(step % 2, rank) for rank in parts])
        optimizer.zero_grad()
        loss = (model(x) - x).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def float8(strategy, path):
    fabric = launched(strategy, precision="float8")
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    kinds = [type(layer).__name__ for layer in model.module]
    losses = train(fabric, model, optimizer)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    weights = {name: value.clone() for name, value in fabric.strategy.get_module_state_dict(model).items()}
    other = net(3)
    other, optimizer = fabric.setup(other, torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.9))
    fabric.load(path, {"model": other, "optimizer": optimizer})
    return losses, weights, dict(fabric.strategy.get_module_state_dict(other)), kinds


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "local_sgd"])
def test_float8_training(ranks, tmp_path, strategy):
    found = ranks.run(float8, strategy, tmp_path / "two", world_size=2)
    (alone,) = ranks.run(float8, strategy, tmp_path / "one", world_size=1)
    for losses, weights, loaded, kinds in (alone, *found):
        assert kinds == ["Float8Linear", "Tanh", "Float8Linear"] or strategy in ("zero2", "fsdp")
        assert losses[-2] < losses[0]
        if weights:  # of split ones rank zero has them all
            torch.testing.assert_close(loaded, weights, rtol=0, atol=0)
        if weights and strategy != "local_sgd":
            # Scales are of a rank's own batch, so that products round otherwise.
            torch.testing.assert_close(weights, alone[1], rtol=0.05, atol=0.02)


def test_float8_is_near_float32_and_not_float32():
    plain = net()
    fabric = launched(precision="float8")
    model = fabric.setup_module(copy.deepcopy(plain))
    x = batch(0, 0)
    error = (model(x) - plain(x)).abs().mean() / plain(x).abs().mean()
    assert 1e-4 < error < 0.1


def int8(path):
    fabric = launched("zero1", plugins=TorchAOPrecision("int8-weights", ignore_modules={"2"}))
    model = fabric.setup_module(net(fabric.global_rank))
    optimizer = fabric.setup_optimizers(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    )
    losses = train(fabric, model, optimizer)
    fabric.save(path, {"model": model})
    other = fabric.setup_module(net(5))
    fabric.load(path, {"model": other})
    with torch.no_grad():
        return losses, model(batch(9, 0)), other(batch(9, 0)), type(model.module[0].weight).__name__


def test_weights_in_int8(ranks, tmp_path):
    found = ranks.run(int8, tmp_path / "c", world_size=2)
    for losses, out, loaded, kind in found:
        assert kind == "Int8Tensor"
        assert losses[-2] < losses[0]
        assert torch.equal(out, loaded)
        assert torch.equal(out, found[0][1])


class Tied(nn.Module):
    """Two layers of one weight, and an embedding with that of a third one."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight, self.head.weight = self.a.weight, self.words.weight

    def forward(self, x):
        return self.head(self.b(torch.tanh(self.a(self.words(x)))))


@pytest.mark.parametrize("mode", ["float8", "int8-weights"])
def test_tied_weights_stay_tied(mode):
    fabric = launched(plugins=TorchAOPrecision(mode, ignore_modules={"head"}))
    model = fabric.setup_module(Tied())
    assert model.a.weight is model.b.weight
    assert model.head.weight is model.words.weight
    assert model.words.weight.requires_grad
    assert model.a.weight.requires_grad == (mode == "float8")
    fabric.backward(model(torch.arange(16)).sum())
    if mode == "int8-weights":
        fabric = launched(plugins=TorchAOPrecision(mode))
        with pytest.raises(ConfigurationError, match=r"the weight of 'head' apart from 'words.weight'"):
            fabric.setup_module(Tied())


@pytest.mark.parametrize("mode", ["float8", "int8-weights"])
def test_an_encoder_computes_by_its_layers_in_evaluation_too(mode):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), 2)
    model = launched(plugins=TorchAOPrecision(mode)).setup_module(model).eval()
    x = torch.randn(2, 8, 32)
    padding = torch.arange(8) > torch.tensor([[7], [5]])
    for given in ({}, {"src_key_padding_mask": padding}):
        want = model(x, **given)  # with gradients: layer by layer
        with torch.no_grad():
            torch.testing.assert_close(model(x, **given), want)


def test_what_is_refused():
    with pytest.raises(ConfigurationError, match=r"FSDPStrategy shards parameters over ranks, but the"):
        Fabric(accelerator="cpu", devices=2, strategy="fsdp", plugins=TorchAOPrecision("int8-weights"))
    with pytest.raises(ConfigurationError, match=r"\('float9'\) is not a mode. Did you mean 'float8'"):
        TorchAOPrecision("float9")
    with pytest.raises(ConfigurationError, match="only the mode 'float8' has a config"):
        TorchAOPrecision("int8-weights", config=object())
    model = net()
    fabric = launched(plugins=TorchAOPrecision("int8-weights"))
    with pytest.raises(ConfigurationError, match="2 of 4 parameters of SGD"):
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
