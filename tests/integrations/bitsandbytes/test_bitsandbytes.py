"""BitsandbytesPrecision with the real package: on one rank and two, where models are kept whole."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.plugins.precision import BitsandbytesPrecision

FIXED = ["nf4", "nf4-dq", "fp4", "fp4-dq", "int8"]
ERROR = {"nf4": 0.2, "nf4-dq": 0.2, "fp4": 0.3, "fp4-dq": 0.3, "int8": 0.03, "int8-training": 0.03}


class Tied(nn.Module):
    """Two layers of one weight, and one that has it under another name, in an encoder's middle."""

    ignored = {"head"}

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 64)
        self.a, self.b, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32, bias=False)
        self.c, self.b.weight, self.head.weight = self.b, self.a.weight, self.words.weight

    def forward(self, x):
        return self.head(self.c(torch.tanh(self.b(torch.tanh(self.a(self.words(x)))))))


class Net(nn.Module):
    """Linear layers, one of them without a bias, with an adapter that is trained."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.adapter = nn.Linear(64, 64)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden) + self.adapter(hidden)


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch(step, rank):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def launched(mode, strategy="ddp", devices=None, ignored=("adapter",), dtype=torch.float32):
    plugin = BitsandbytesPrecision(mode, dtype=dtype, ignore_modules=set(ignored))
    count = devices or (dist.get_world_size() if dist.is_initialized() else 1)
    fabric = Fabric(
        accelerator="cpu", devices=count, strategy=strategy if count > 1 else "auto", plugins=plugin
    )
    fabric.launch()
    return fabric


def trained_parts(model):
    return [p for p in model.parameters() if p.requires_grad]


def on_a_rank(mode, strategy, path):
    fabric = launched(mode, strategy)
    model = fabric.setup_module(net(fabric.global_rank))  # rank zero's values count
    optimizer = fabric.setup_optimizers(torch.optim.SGD(trained_parts(model), lr=0.1, momentum=0.9))
    own = [batch(step, fabric.global_rank) for step in range(3)]
    both = [torch.cat([batch(step, rank) for rank in (0, 1)]) for step in range(3)]
    for x in own if fabric.world_size > 1 else both:
        optimizer.zero_grad()
        fabric.backward(model(x).pow(2).mean())
        optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer})
    probe = batch(99, 0)
    with torch.no_grad():
        out = model(probe)
    other = fabric.setup_module(net(5))
    fabric.load(path, {"model": other})
    with torch.no_grad():
        again = other(probe)
        fabric.load(path, {"model": other})  # after a forward, too
        once_more = other(probe)
    kinds = [type(layer).__name__ for layer in (model.first, model.last, model.adapter)]
    return out, again, once_more, kinds


@pytest.mark.parametrize("mode", [*FIXED, "int8-training"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_two_ranks_train_what_one_trains_and_checkpoints_load_back(ranks, tmp_path, mode, strategy):
    found = ranks.run(on_a_rank, mode, strategy, tmp_path / "two", world_size=2)
    (alone,) = ranks.run(on_a_rank, mode, strategy, tmp_path / "one", world_size=1)
    for out, again, once_more, kinds in (alone, *found):
        assert torch.equal(out, again)
        assert torch.equal(out, once_more)
        assert kinds[2] == "Linear"
        assert "Linear" not in kinds[:2]
        # int8 products round otherwise for other batches
        torch.testing.assert_close(out, alone[0], rtol=2e-2, atol=2e-2 if "int8" in mode else 1e-4)


@pytest.mark.parametrize("mode", ERROR)
def test_numbers_are_near_those_of_plain_layers(mode):
    plain = net()
    fabric = launched(mode, ignored=())
    model = fabric.setup_module(copy.deepcopy(plain))
    x = batch(0, 0)
    with torch.no_grad():
        error = (model(x) - plain(x)).abs().mean() / plain(x).abs().mean()
    assert 0 < error < ERROR[mode]
    sizes = {name: p.element_size() * p.numel() for name, p in model.named_parameters()}
    share = {"n": 8, "f": 8, "i": 4}[mode[0]] if mode != "int8-training" else 1
    assert sizes["first.weight"] == 64 * 64 * 4 // share


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [*FIXED, "int8-training"])
def test_a_checkpoint_of_plain_weights_is_quantised_while_it_is_loaded(mode, dtype, tmp_path):
    torch.save({"model": net(3).state_dict()}, tmp_path / "plain.pt")
    fabric = launched(mode, dtype=dtype)
    model, expected = fabric.setup_module(net(0)), fabric.setup_module(net(3))
    fabric.load(tmp_path / "plain.pt", {"model": model})
    with torch.no_grad():
        assert torch.equal(model(batch(0, 0)), expected(batch(0, 0)))


def rounded(weight, mode):
    """The numbers that a stored weight stands for."""
    from bitsandbytes import functional

    if mode.startswith("int8"):
        stored, scales, _ = functional.int8_vectorwise_quant(weight.half())
        return stored.float() * (scales[:, None] / 127)
    kind, _, twice = mode.partition("-")
    stored = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=bool(twice), blocksize=64)
    return functional.dequantize_4bit(*stored)


@pytest.mark.parametrize("mode", ERROR)
def test_tied_weights_stay_tied(mode, tmp_path):
    torch.manual_seed(0)
    plain = Tied()
    fabric = launched(mode, ignored=Tied.ignored)
    model = fabric.setup_module(copy.deepcopy(plain))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(trained_parts(model), lr=0.1))
    assert model.a.weight is model.b.weight is model.c.weight
    assert model.head.weight is model.words.weight
    own, fixed = plain.a.weight, mode != "int8-training"
    if fixed:
        own.requires_grad_(False).copy_(rounded(own, mode))
    sgd = torch.optim.SGD(trained_parts(plain), lr=0.1)
    for step in range(3):
        x = torch.randint(32, (2, 5), generator=torch.Generator().manual_seed(step))
        kept = own.detach().clone()
        optimizer.zero_grad()
        fabric.backward(model(x).pow(2).mean())
        optimizer.step()
        sgd.zero_grad()
        if not fixed:
            own.data.copy_(rounded(kept, mode))  # what products are of
        plain(x).pow(2).mean().backward()
        own.data.copy_(kept)
        sgd.step()
    for name, value in plain.named_parameters():
        if name != "a.weight" or not fixed:
            torch.testing.assert_close(dict(model.named_parameters())[name], value, rtol=1e-2, atol=1e-3)
    fabric.save(tmp_path / "c", {"model": model})
    other = fabric.setup_module(Tied())
    fabric.load(tmp_path / "c", {"model": other})
    assert other.a.weight is other.b.weight
    with torch.no_grad():
        assert torch.equal(other.eval()(x), model.eval()(x))
        copied = copy.deepcopy(other)
        fabric.load(tmp_path / "c", {"model": copied})
        assert torch.equal(copied(x), model(x))


def test_a_tied_weight_that_would_come_apart_is_refused():
    with pytest.raises(ConfigurationError, match=r"the weight of 'head' apart from 'words.weight', which is"):
        launched("nf4", devices=1, ignored=()).setup_module(Tied())


@pytest.mark.parametrize("mode", ERROR)
def test_an_encoder_in_training_and_in_evaluation_by_turns(mode):
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True), 2)
    model = launched(mode, ignored=()).setup_module(copy.deepcopy(plain))
    for layer in plain.layers:
        for linear in (layer.linear1, layer.linear2):
            linear.weight.data.copy_(rounded(linear.weight.data, mode))
    x = torch.randn(2, 5, 64)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    for training in (False, True, False, True):
        model.train(training)
        plain.train(training)
        for given in ({}, {"src_key_padding_mask": padding}):
            with torch.set_grad_enabled(training):
                out = model(x, **given)
            want = plain(x, **given)
            seen = ~padding if given else padding | True
            # Of activations that are in 8 bits, too, in evaluation; or in half precision.
            torch.testing.assert_close(out[seen], want[seen], rtol=0.05, atol=0.05)
            if training:
                grads = [torch.autograd.grad(out.pow(3).mean(), m.layers[0].norm1.weight)[0]
                         for m, out in ((model, out), (plain, want))]  # fmt: skip
                torch.testing.assert_close(*grads, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("mode", ERROR)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (2, 1, 3, 64)])
def test_inputs_of_all_shapes(mode, shape):
    model = launched(mode, ignored=()).setup_module(nn.Linear(64, 32))
    x = torch.randn(shape, requires_grad=True)
    out = model(x)
    assert out.shape == (*shape[:-1], 32)
    out.sum().backward()
    assert model.bias.grad.allclose(torch.full((32,), float(x.numel() // 64)))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), out, rtol=0.05, atol=0.05)


def splits(strategy):
    fabric = launched("int8-training", strategy, ignored=())
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        mine = [batch(step, rank) for rank in ([fabric.global_rank] if fabric.world_size > 1 else [0, 1])]
        optimizer.zero_grad()
        fabric.backward(model(torch.cat(mine)).pow(2).mean())
        optimizer.step()
    with fabric.whole(model) as whole:
        return None if whole is None else {name: value.clone() for name, value in whole.named_parameters()}


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_weights_that_are_trained_in_8_bits_may_be_split(ranks, strategy):
    (alone,) = ranks.run(splits, "auto", world_size=1)
    torch.testing.assert_close(ranks.run(splits, strategy, world_size=2)[0], alone)


def test_an_evaluation_sees_the_step_before():
    fabric = launched("int8-training", devices=1)
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5))
    x = batch(0, 0)
    fabric.backward(model(x).pow(2).mean())
    before = model(x).pow(2).mean()
    optimizer.step()
    with torch.no_grad():
        assert model.eval()(x).pow(2).mean() < 0.9 * before


def test_half_of_everything_else_by_default():
    fabric = Fabric(accelerator="cpu", devices=1, plugins=BitsandbytesPrecision("nf4"))
    model = fabric.setup_module(net())
    assert model.first.bias.dtype == torch.bfloat16
    assert model(batch(0, 0)).dtype == torch.float32


def refused(strategy):
    return Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=BitsandbytesPrecision("nf4"))


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "pipeline"])
def test_it_is_refused_where_parameters_are_split(strategy):
    with pytest.raises(ConfigurationError, match=r"over ranks, .* Write strategy=\"ddp\" or \"zero1\""):
        refused(strategy)


def test_an_optimizer_of_weights_that_are_replaced_is_refused():
    fabric, model = launched("nf4", devices=1), net()
    with pytest.raises(ConfigurationError, match="2 of 5 parameters of SGD"):
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_names_that_are_none():
    with pytest.raises(ConfigurationError, match=r"'adaptor', but Net has no module of that name"):
        launched("nf4", devices=1, ignored=["adaptor"]).setup_module(net())
    with pytest.raises(ConfigurationError, match="replaces linear layers, and Tanh has none"):
        launched("nf4", devices=1, ignored=[]).setup_module(nn.Tanh())
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(ConfigurationError, match="needs values, and 'first' is on the meta device"):
        launched("nf4", devices=1).setup_module(empty, move_to_device=False)
    with pytest.raises(ConfigurationError, match=r"\('nf8'\) is not a mode. Did you mean 'nf4'"):
        BitsandbytesPrecision("nf8")
