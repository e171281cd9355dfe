"""Models in which micro-batches are not what the batch is: warned of, or refused, on all ranks."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from fabric import Fabric
from fabric.core.errors import FabricError
from fabric.strategies import PipelineStrategy
from fabric.strategies.pipeline.trial import _differ
from fabric.strategies.trial import distance

X = torch.randn(8, 8, 4, generator=torch.Generator().manual_seed(1))


def start(**settings) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=PipelineStrategy(**settings))
    fabric.launch()
    return fabric


class Centred(nn.Module):
    """A row less the mean of all rows."""

    def forward(self, x):
        return x - x.mean(0)


class Noisy(nn.Module):
    """Draws in evaluation, too."""

    def forward(self, x):
        return x + torch.randn_like(x)


class InPlace(nn.Module):
    """Changes what it is given."""

    def forward(self, x):
        return x.mul_(2)


class Masked(nn.Module):
    """Attention with a mask that comes along with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, both, mask=None):
        x, mask = (both, mask) if mask is not None else both
        return x + F.scaled_dot_product_attention(self.project(x), x, x, mask), mask


class First(nn.Module):
    """The first of two."""

    def forward(self, both):
        return both[0]


def mixed(kind):
    fabric = start(num_microbatches=4, balance=[2, 1])
    torch.manual_seed(0)
    model = fabric.setup(nn.Sequential(kind(), nn.Linear(4, 4), nn.LayerNorm(4)))
    x = X.clone()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(1 if kind is InPlace else 2):
            model(x[:, 0])
    return [str(warning.message) for warning in caught], x


@pytest.mark.parametrize("kind", [Centred, Noisy, InPlace, nn.Identity])
def test_rows_that_depend_on_each_other_are_warned_of_once(ranks, kind):
    (found, x), (others, _) = ranks.run(mixed, kind, world_size=2)
    assert others == []
    assert len(found) == (kind is Centred)
    if found:
        assert "The output of Sequential for one row depends on the other rows of its batch" in found[0]
    torch.testing.assert_close(x[:, 0], X[:, 0] * (2 if kind is InPlace else 1))


def differ_by(off, compute):
    one = torch.ones(1, 4)
    return _differ(one, torch.cat([one * (1 + off), one]), compute)


def test_rounding_is_no_difference():
    for off, compute in ((1e-5, torch.float32), (2e-2, torch.bfloat16)):
        assert not differ_by(off, compute)
        assert differ_by(10 * off if compute is torch.bfloat16 else 1e-2, compute)


def masked(count):
    model = start(num_microbatches=count, balance=[1, 2]).setup(nn.Sequential(Masked(), Masked(), First()))
    try:
        model(X, torch.ones(8, 8, dtype=torch.bool).tril())
    except FabricError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("count", [4, 8])
def test_a_mask_of_as_many_positions_as_there_are_rows_is_refused(ranks, count):
    for text in ranks.run(masked, count, world_size=2):
        assert "Sequential runs on one row of the batch, but not on two (RuntimeError" in text
        assert "Keep tensors of all samples in a buffer of the model" in text


def warned(count):
    fabric = start(num_microbatches=count, balance=[2, 2])
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = nn.utils.spectral_norm(nn.Linear(4, 4))
        new = parametrizations.spectral_norm(nn.Linear(4, 4))
        caught.clear()
        fabric.setup(nn.Sequential(nn.Embedding(3, 4, scale_grad_by_freq=True), old, new, nn.Linear(4, 4)))
    return [str(warning.message) for warning in caught]


def test_modules_that_count_batches_are_warned_of(ranks):
    (text,), others = ranks.run(warned, 4, world_size=2)
    assert re.match(
        r"The model has 0 \(Embedding\), 1 \(Linear\), 2 \(\w+\)\. Batch norm, spectral norm and scale_grad",
        text,
    )
    assert others == []
    assert ranks.run(warned, 1, world_size=2) == [[], []]


class SetsItselfUp(nn.Module):
    """At its first call; counts rows past autograd's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first = nn.Linear(4, 4), True
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen.data += len(x)
        if self.first:
            self.first = False
            self.layer.register_forward_hook(lambda module, args, out: out + 1)
            self.extra = nn.Identity()
        return self.extra(self.layer(x))


def traces() -> list:
    fabric = start(num_microbatches=2, balance=[1, 1])
    torch.manual_seed(0)
    model = fabric.setup(nn.Sequential(SetsItselfUp(), nn.Linear(4, 2)))
    model(torch.ones(6, 4))
    block = model.module[0]
    return [block.seen.item(), len(block.layer._forward_hooks)] if fabric.global_rank == 0 else []


def test_a_trial_leaves_no_trace_in_buffers_hooks_and_modules(ranks):
    assert ranks.run(traces, world_size=2)[0] == [6.0, 1]


def test_parts_of_complex_numbers_differ_by_themselves():
    one = torch.tensor([1 + 1j, 2 + 2j])
    assert distance(one, one.conj()) == pytest.approx(2**0.5)
