"""Modules built without memory: every way to initialise is repeated exactly, and the draws go on."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import init

from fabric.core.errors import UsageError
from fabric.strategies.deferred_init.deferred import DeferredInit

CPU = torch.device("cpu")


def parameter(change, *shape: int) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(*shape or (6, 5)))
    change(module.weight)
    return module


def by_hand(weight) -> None:
    weight.data.uniform_(-1, 1).mul_(3).clamp_(-2, 2)
    weight.data[0].fill_(7)
    weight.data[:, 1] = torch.arange(6.0)
    with torch.no_grad():
        weight += 1
        weight[2].normal_()
        weight.view(-1)[3:9].zero_()


def changed(change) -> nn.Module:
    layer = nn.Linear(3, 4, dtype=torch.float32)
    change(layer)
    return layer


def scale_and_fill(layer) -> None:
    layer.weight = nn.Parameter(layer.weight.abs() * 0.5)
    init.zeros_(layer.bias)
    layer.weight.data[0].uniform_()


def stacked() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def second_pass() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    for module in model:
        init.normal_(module.weight, std=0.02)
    init.kaiming_normal_(model[2].weight)
    return model


FILLS = (
    "uniform_", "normal_", "ones_", "zeros_", "eye_", "xavier_uniform_", "xavier_normal_",
    "kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_",
)  # fmt: skip
MAKERS = {
    **{name: partial(parameter, getattr(init, name)) for name in FILLS},
    "constant_": lambda: parameter(lambda w: init.constant_(w, 0.3)),
    "sparse_": lambda: parameter(lambda w: init.sparse_(w, 0.2)),
    "dirac_": lambda: parameter(init.dirac_, 4, 4, 3),
    "trunc_normal_ far out": lambda: parameter(lambda w: init.trunc_normal_(w, mean=3.0, a=2.9, b=3.0)),
    "generator": lambda: parameter(lambda w: init.normal_(w, generator=torch.Generator().manual_seed(3))),
    "bernoulli_": lambda: parameter(lambda w: w.data.bernoulli_(0.3)),
    "exponential_": lambda: parameter(lambda w: w.data.exponential_()),
    "by hand": lambda: parameter(by_hand),
    "Linear": lambda: nn.Linear(3, 4),
    "Embedding": lambda: nn.Embedding(7, 4, padding_idx=1),
    "Conv2d": lambda: nn.Conv2d(2, 3, 3),
    "LSTM": lambda: nn.LSTM(2, 3, 2),
    "Bilinear": lambda: nn.Bilinear(2, 3, 4),
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
    "Transformer": lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
    "copies": stacked,
    "second pass": second_pass,
    "deepcopy": lambda: copy.deepcopy(nn.Linear(3, 3)),
    "EmbeddingBag": lambda: nn.EmbeddingBag(5, 3),
    "PReLU": lambda: nn.PReLU(3),
    "half and back": lambda: nn.Linear(3, 4).half().float(),
    "double": lambda: nn.Linear(3, 4).double(),
    "bfloat16": lambda: nn.Linear(3, 4).to(torch.bfloat16),
    "from double": lambda: nn.Linear(3, 4, dtype=torch.float64).float(),
    "scaled": lambda: changed(lambda m: setattr(m, "weight", nn.Parameter(m.weight * 0.5))),
    "scaled data": lambda: changed(lambda m: setattr(m.weight, "data", m.weight.data * 0.5)),
    "transposed": lambda: changed(lambda m: setattr(m, "weight", nn.Parameter(m.weight.t() * 2 + 1))),
    "scaled, then filled": lambda: changed(scale_and_fill),
    "data from values": lambda: changed(lambda m: setattr(m.weight, "data", torch.full((4, 3), 2).float())),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_draws_are_those_of_a_plain_construction(name, dtype):
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if dtype is torch.bfloat16 and name == "orthogonal_":
            pytest.skip("torch has no QR in bfloat16")
        torch.manual_seed(1)
        plain, after = MAKERS[name](), torch.rand(3)
        torch.manual_seed(1)
        deferred = DeferredInit(CPU)
        with deferred:
            empty = MAKERS[name]()
        assert torch.equal(torch.rand(3), after)
        state = torch.get_rng_state()
        for (key, want), got in zip(plain.named_parameters(), empty.parameters(), strict=True):
            assert got.is_meta, key
            assert deferred.has_values(got), key
            assert torch.equal(deferred.make(got), want), key
        for (key, want), got in zip(plain.named_buffers(), empty.buffers(), strict=True):
            assert torch.equal(got, want), key
        assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_default_dtype(previous)


def retied(model) -> None:
    model[1].weight = model[0].weight
    model[1].weight.data.mul_(2)


def again_by_hand(model) -> None:
    by_hand(model[0].weight)
    model[0].weight.data -= 1
    model[0].weight.chunk(2)[1].data.normal_()


def by_data(model) -> None:
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(mean=0.0, std=0.02)
            part.bias.data.zero_()


LATER = {
    "nn.init": lambda m: [init.normal_(p, std=0.02) for p in m.parameters()],
    "trunc_normal_": lambda m: [init.trunc_normal_(p, std=0.02) for p in m.parameters()],
    "xavier_normal_": lambda m: init.xavier_normal_(m[1].weight),
    ".data": by_data,
    "by hand": again_by_hand,
    "reset_parameters": lambda m: [part.reset_parameters() for part in m],
    "setattr": lambda m: setattr(m[0], "bias", nn.Parameter(m[0].bias * 2)),
    "dtype": lambda m: by_data(m.double()),
    "values": lambda m: setattr(m[0].weight, "data", torch.full((6, 5), 3.0)),
    "tied": retied,
    "loaded": lambda m: [p.data.copy_(torch.ones(p.shape)) for p in m.parameters()],
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("copied", [False, True])
def test_what_is_changed_after_the_construction_counts(name, copied):
    def build():
        return nn.Sequential(nn.Linear(5, 6), nn.Linear(5, 6))

    def later(model):
        if copied:
            model = copy.deepcopy(model)
        LATER[name](model)
        return copy.deepcopy(model) if copied else model

    torch.manual_seed(1)
    plain, after = later(build()), torch.rand(3)
    torch.manual_seed(1)
    with DeferredInit(CPU):
        empty = build()
    empty = later(empty)
    assert torch.equal(torch.rand(3), after)
    assert len(list(empty.parameters())) == len(list(plain.parameters()))
    for got, want in zip(empty.parameters(), plain.parameters(), strict=True):
        assert isinstance(got, nn.Parameter)
        assert got.is_meta
        assert torch.equal(got.recorder.make(got), want)


def test_values_that_are_not_there_yet_cannot_be_read_later():
    with DeferredInit(CPU):
        layer = nn.Linear(2, 2)
    assert layer(torch.empty(3, 2, device="meta")).shape == (3, 2)  # as for counting operations
    layer.bias = nn.Parameter(layer.bias + torch.rand_like(layer.bias))
    with pytest.raises(UsageError, match=r"rand_like reads a tensor of shape \[2\] that has no values yet"):
        layer.bias.recorder.make(layer.bias)
    with pytest.raises(UsageError, match=r"copy_ reads a tensor of shape \[2, 2\]"):
        torch.zeros(2, 2).copy_(layer.weight.data)
    for read in (layer(torch.ones(1, 2)).sum().item, layer.weight.sum().item, lambda: layer.to("cpu")):
        with pytest.raises(UsageError, match=r"reads a tensor of shape .* that has no values yet"):
            read()
    assert "meta" in repr(layer.weight)
    assert "Linear" in repr(layer)
    layer.to_empty(device="cpu")
    assert type(layer.weight) is nn.Parameter


def test_tensors_with_values_stay_as_they_are():
    with DeferredInit(CPU):
        made = (
            nn.Parameter(torch.randn(3)),
            torch.zeros(2),
            torch.tensor([1.0]),
            torch.linspace(0, 1, 3).tolist(),
        )
    assert not made[0].is_meta
    assert not made[1].is_meta
    assert made[3] == [0, 0.5, 1]


def test_what_is_never_initialised_is_not_known():
    deferred = DeferredInit(CPU)
    with deferred:
        weight = nn.Parameter(torch.empty(3))
    assert weight.is_meta
    assert not deferred.has_values(weight)


def test_a_part_of_a_tensor_is_made_by_itself():
    deferred = DeferredInit(CPU)
    with deferred:
        whole = torch.empty(2, 3)
        whole.copy_(torch.arange(6.0).view(2, 3))
        part = nn.Parameter(whole[1])
    made = deferred.make(part)
    assert torch.equal(made, torch.tensor([3.0, 4.0, 5.0]))
    assert made.untyped_storage().nbytes() == 12


def test_numbers_of_what_is_not_there_are_an_error():
    with DeferredInit(CPU):
        weight = nn.Linear(2, 2).weight
        with pytest.raises(UsageError, match=r"item reads a tensor of shape \[\] that has no values yet"):
            weight.sum().item()


def test_what_is_computed_of_several_tensors_is_repeated():
    def build():
        one, two, three = nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 3)
        two.weight.data.copy_(one.weight.data.t())
        one.weight.data.div_(one.weight.data.norm(dim=1, keepdim=True))
        three.weight = nn.Parameter(torch.cat([one.weight, two.weight.t()])[1:4].clone())
        two.weight.data[1] = 5.0
        return nn.ModuleList([one, two, three])

    torch.manual_seed(1)
    plain, after = build(), torch.rand(3)
    torch.manual_seed(1)
    deferred = DeferredInit(CPU)
    with deferred:
        empty = build()
    assert torch.equal(torch.rand(3), after)
    for got, want in zip(empty.parameters(), plain.parameters(), strict=True):
        assert torch.equal(deferred.make(got), want)
