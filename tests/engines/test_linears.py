"""`replace_linears` with a layer of our own: it is wherever the old one was, and weights stay together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from fabric.core.errors import ConfigurationError
from fabric.integrations.linears import replace_linears


class Doubled(nn.Linear):
    """Twice what the layer gave."""

    def forward(self, x):
        return 2 * super().forward(x)


def doubled(layer):
    made = Doubled(layer.in_features, layer.out_features, device="meta")
    made.weight, made.bias = layer.weight, layer.bias
    return made


def stored(layer):
    """As those that store weights in few bits: a weight of its own."""
    made = doubled(layer)
    made.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    return made


class Twice(nn.Module):
    """One layer under two names and in a list, with hooks; and one that has its weight."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b, self.steps = self.a, [self.a, self.a]
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.a.weight
        self.seen = []
        self.a.register_forward_hook(lambda *_: self.seen.append("hook"))
        self.handle = self.a.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        self.a.note = "the user's"

    def forward(self, x):
        return self.tied(self.steps[1](self.b(x)))


@pytest.mark.parametrize("make", [doubled, stored])
def test_all_that_hold_a_layer_hold_the_new_one(make):
    plain = Twice().eval()
    model = copy.deepcopy(plain)
    model.steps = [model.a, model.a]
    replace_linears(model, make, "asked", replaces=make is stored)
    assert type(model.a) is Doubled
    assert model.a is model.b is model.steps[0]
    assert model.a.note == "the user's"
    assert not model.a.training
    assert model.tied.weight is model.a.weight
    assert [name for name, _ in model.named_parameters()] == ["a.weight", "a.bias"]
    x = torch.randn(3, 4)

    def layer(x):
        return 2 * nn.functional.linear(x + 1, plain.a.weight, plain.a.bias)

    torch.testing.assert_close(model(x), 2 * nn.functional.linear(layer(layer(x)), plain.a.weight))
    again = copy.deepcopy(model)
    assert again.tied.weight is again.a.weight
    again(x)


def test_a_hook_is_removed_by_its_handle():
    model = Twice()
    replace_linears(model, doubled, "asked")
    model.handle.remove()
    x = torch.randn(3, 4)
    torch.testing.assert_close(model.a(x), 2 * nn.functional.linear(x, model.a.weight, model.a.bias))
    assert model.seen == ["hook"]


def test_a_model_that_is_one_layer():
    model = nn.Linear(4, 4)
    replace_linears(model, doubled, "asked")
    assert type(model) is Doubled


def test_layers_whose_weight_is_computed_stay():
    model = nn.Sequential(
        spectral_norm(nn.Linear(4, 4)),  # weight_norm of old is like it, and deprecated
        parametrizations.weight_norm(nn.Linear(4, 4)),
        prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
        nn.Linear(4, 4),
    )
    replace_linears(model, doubled, "asked")
    assert [type(layer) is Doubled for layer in model] == [False, False, False, True]


def test_what_is_ignored_under_one_name_is_so_under_the_other():
    model = Twice()
    replace_linears(model, doubled, "asked", {"b"})
    assert type(model.a) is nn.Linear
    assert type(model.tied) is Doubled


class Words(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self):
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight


def test_a_weight_that_something_else_has_is_refused_where_weights_are_replaced():
    model = Words()
    with pytest.raises(ConfigurationError) as caught:
        replace_linears(model, stored, "asked", replaces=True)
    assert str(caught.value) == (
        "asked would take the weight of 'head' apart from 'words.weight', which is the same parameter. Leave "
        "that layer as it is: ignore_modules={'head'}."
    )
    assert type(model.middle) is nn.Linear
    replace_linears(model, stored, "asked", {"head"}, replaces=True)
    assert type(model.middle) is Doubled
    replace_linears(model, doubled, "asked")
    assert model.head.weight is model.words.weight


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layers", [0, 2])
def test_an_encoder_computes_by_its_layers_in_evaluation_too(layers, padded):
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    if layers:
        model = nn.TransformerEncoder(model, layers)
    replace_linears(model, doubled, "asked")
    x, padding = torch.randn(2, 3, 4), torch.tensor([[False, False, False], [False, False, True]])
    given = {"src_key_padding_mask": padding} if padded else {}
    want = model.eval()(x, **given)  # with gradients: layer by layer
    with torch.no_grad():
        torch.testing.assert_close(model(x, **given), want)
    untouched = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    replace_linears(nn.ModuleList([untouched, nn.Linear(2, 2)]), doubled, "asked", {"0"})
    assert untouched.activation_relu_or_gelu
