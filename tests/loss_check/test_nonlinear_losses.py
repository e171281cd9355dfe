"""Losses that are no mean over rows are warned of once; losses of rows, and of gathered rows, are not."""

from __future__ import annotations

import warnings

import pytest
import torch
from data_cases import launched
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from fabric.utilities.warnings import RanksDifferWarning


def mse(out, y):
    return functional.mse_loss(out, y)


def dice(out, y):
    p = out.sigmoid()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


NONLINEAR = {
    "sqrt of a mean": lambda out, y, fabric: mse(out, y).sqrt(),
    "log of a mean": lambda out, y, fabric: 2 * mse(out, y).log() + out.mean(),
    "exp of a mean": lambda out, y, fabric: mse(out, y).exp(),
    "pow of a mean": lambda out, y, fabric: (out.mean() - 1) ** 2,
    "a quotient by": lambda out, y, fabric: dice(out, y),
    "a product with a mean": lambda out, y, fabric: mse(out, y) * out.square().mean(),
    "a norm": lambda out, y, fabric: (out - y).norm(),
    "a variance": lambda out, y, fabric: mse(out, y) + out.var(),
    "topk or sort": lambda out, y, fabric: (out - y).square().mean(1).topk(2).values.mean(),
    "max or median": lambda out, y, fabric: (out - y).square().max(),
    "logsumexp": lambda out, y, fabric: torch.logsumexp((out - y).flatten(), 0),
    "softmax over rows": lambda out, y, fabric: -(out.log_softmax(0) * y).sum(1).mean(),
    "pow of": lambda out, y, fabric: (out.mean(0) - y.mean(0)).square().sum(),
    "mse loss of a mean": lambda out, y, fabric: mse(out.mean(0), y.mean(0)),
    "log of": lambda out, y, fabric: -(out.softmax(1).mean(0).log()).sum(),
    "a product with a mean or sum": lambda out, y, fabric: torch.cov(out.T).square().sum(),
    "abs of a mean": lambda out, y, fabric: mse(out, y) + (out.mean() - 1).abs(),
    "a product": lambda out, y, fabric: ((out - y).square() * (out - y).abs().mean()).mean(),
}
PAIRS = {
    "negatives of the batch": lambda out, y: functional.cross_entropy(
        out @ out.mT / 0.1, torch.arange(len(y))
    ),
    "a diagonal that is filled in place": lambda out, y: functional.cross_entropy(
        (out @ out.T / 0.1).fill_diagonal_(-1e9), torch.arange(len(y)).roll(1)
    ),
    "einsum": lambda out, y: torch.einsum("bd,cd->bc", out, out).logsumexp(1).mean(),
    "of part of a row": lambda out, y: functional.cross_entropy(
        out[:, :2] @ out[:, 1:].T, torch.arange(len(y))
    ),
    "of normalised rows": lambda out, y: functional.cross_entropy(
        functional.normalize(out) @ functional.normalize(out).T, torch.arange(len(y))
    ),
    "cosines": lambda out, y: functional.cosine_similarity(out[:, None], out[None], dim=-1).exp().mean(),
    "distances": lambda out, y: torch.cdist(out, out).mean(),
    "distances of pairs": lambda out, y: torch.pdist(out).mean(),
    "differences": lambda out, y: (out[:, None] - out[None]).square().exp().mean(),
    "differences of scores": lambda out, y: functional.softplus(out[:, :1] - out[:, 0]).mean(),
    "a covariance": lambda out, y: (out.mT @ out / len(y)).square().sum(),
    "per head": lambda out, y: torch.einsum("bhd,chd->hbc", *[out.unflatten(1, (3, 1))] * 2).exp().mean(),
}
OF_ROWS = {
    "mean": lambda out, y, fabric: mse(out, y),
    "norms of rows": lambda out, y, fabric: (out - y).norm(dim=1).mean(),
    "dice of rows": lambda out, y, fabric: torch.stack(
        [dice(*pair) for pair in zip(out, y, strict=True)]
    ).mean(),
    "roots of rows": lambda out, y, fabric: (
        sum([mse(*pair).sqrt() for pair in zip(out, y, strict=True)]) / len(y)
    ),
    "normalised rows": lambda out, y, fabric: -(functional.normalize(out, dim=1) * y).sum(1).mean(),
    "largest of a row": lambda out, y, fabric: out.topk(2, dim=1).values.mean() + out.max(1).values.mean(),
    "logsumexp of rows": lambda out, y, fabric: torch.logsumexp(out, 1).mean(),
    "divided by a constant": lambda out, y, fabric: mse(out, y) / mse(out, y).detach().clamp(7, 7),
    "weighted by a parameter": lambda out, y, fabric: (
        mse(out, y) * torch.ones(1, requires_grad=True).exp().sum()
    ),
    "norm of a parameter": lambda out, y, fabric: mse(out, y) + torch.ones(3, requires_grad=True).norm(),
    "ratio": lambda out, y, fabric: ((out - out.detach()).exp() * y).mean(),
    "a mean of all ranks": lambda out, y, fabric: fabric.all_reduce(mse(out, y), sync_grads=True).sqrt(),
    "squared norms": lambda out, y, fabric: (0.5 * (out - y).norm()) ** 2 + mse(out, y).sqrt().square(),
    "sums of products of rows": lambda out, y, fabric: (out.mT @ out).trace() / len(y),
    "a power of 1": lambda out, y, fabric: mse(out, y) ** 1.0,
    "roots of rows by masks": lambda out, y, fabric: (
        sum([((out - y).square().mean(1) * mask).sum().sqrt() for mask in torch.eye(len(y))]) / len(y)
    ),
    "products within rows": lambda out, y, fabric: (out[:, :, None] @ out[:, None]).exp().mean(),
    "differences within rows": lambda out, y, fabric: (out[:, :, None] - out[:, None]).exp().mean(),
    "distances within rows": lambda out, y, fabric: torch.cdist(out[:, :, None], y[:, :, None]).mean(),
    "classes": lambda out, y, fabric: functional.cross_entropy(
        out @ torch.ones(3, 12, requires_grad=True), torch.arange(len(y))
    ),
    "label smoothing": lambda out, y, fabric: functional.cross_entropy(
        out, torch.arange(len(y)) % 3, label_smoothing=0.1
    ),
    "attention": lambda out, y, fabric: (
        functional.scaled_dot_product_attention(*[out[:, :, None] for _ in range(3)]).square().mean()
    ),
    "gathered negatives": lambda out, y, fabric: functional.cross_entropy(
        out @ fabric.all_gather(out, sync_grads=True).flatten(0, 1).T, torch.arange(len(y))
    ),
    "columns that are written in place": lambda out, y, fabric: filled_columns(out).exp().mean(),
    "gathered rows that are written in place": lambda out, y, fabric: functional.cross_entropy(
        out @ with_own_rows(fabric, out).flatten(0, 1).T, torch.arange(len(y)) + fabric.global_rank * len(y)
    ),
    "gathered rows": lambda out, y, fabric: fabric.all_gather((out - y), sync_grads=True).norm(),
}


def filled_columns(out):
    """Rows whose first columns were written in place: by a number, another column, the mean of each row."""
    out = out * 2
    out[:, 0].fill_(0.5)
    out[:, 1] = out[:, 2].exp()
    out[:, :2] += out.mean(1, keepdim=True)
    return out


def with_own_rows(fabric, out):
    """The rows of all ranks, of which this rank's have gradients."""
    joined = fabric.all_gather(out.detach())
    joined[fabric.global_rank] = out
    return joined


def warned(strategy, kind, by_loader=True, loss=None):
    """The warnings of a loop with this loss."""
    fabric = launched(strategy)
    torch.manual_seed(0)
    model, data = WithLoss(loss) if loss else nn.Linear(4, 3), (torch.randn(36, 4), torch.rand(36, 3))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = DataLoader(TensorDataset(*data), 12 // fabric.world_size)
    loader = fabric.setup_dataloaders(loader)
    own = [[part[fabric.global_rank :: fabric.world_size] for part in data] for _ in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in loader if by_loader else own:
            optimizer.zero_grad()
            fabric.backward(loss_of(kind, model, x, y, fabric))
            optimizer.step()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


def loss_of(kind, model, x, y, fabric):
    if kind == "two views":
        first, second = model(torch.cat([x, x + 1])).chunk(2)
        return functional.cross_entropy(first @ second.T, torch.arange(len(y)))
    if kind in PAIRS:
        return PAIRS[kind](model(x), y)
    return {**NONLINEAR, **OF_ROWS}[kind](model(x), y, fabric) if kind else model(x, y)


class WithLoss(nn.Module):
    """A model whose forward returns the loss."""

    def __init__(self, loss):
        super().__init__()
        self.layers, self.kind = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), loss

    def forward(self, x, y):
        return PAIRS.get(self.kind, mse)(self.layers(x), y)


@pytest.mark.parametrize("kind", NONLINEAR)
def test_a_loss_that_is_no_mean_over_rows_is_said_once(ranks, kind):
    first, second = ranks.run(warned, "ddp", kind, world_size=2)
    assert [text.startswith(f"The loss of a backward has {kind}") for text in first] == [True], first
    assert second == []


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_it_is_said_under_each_strategy(ranks, strategy):
    first, *others = ranks.run(warned, strategy, "sqrt of a mean", world_size=3)
    assert len(first) == 1
    assert "fabric.all_reduce(mean, sync_grads=True)" in first[0]
    assert others == [[], []]


@pytest.mark.parametrize("kind", NONLINEAR)
def test_rows_that_no_loader_made_may_be_no_samples(ranks, kind):
    """The instances of one bag, points of a boundary, all items of a catalogue, steps of a sequence."""
    assert ranks.run(warned, "ddp", kind, False, world_size=2) == [[], []]


@pytest.mark.parametrize("kind", OF_ROWS)
def test_a_loss_of_rows_is_not_warned_of(ranks, kind):
    assert ranks.run(warned, "ddp", kind, world_size=2) == [[], []]


@pytest.mark.parametrize("kind", [*PAIRS, "two views"])
def test_pairs_of_rows_are_said_once(ranks, kind):
    first, second = ranks.run(warned, "ddp", kind, world_size=2)
    assert len(first) == 1, first
    said = {
        "differences": "pow of a mean, sum or difference of rows",
        "differences of scores": "softplus of a mean, sum or difference of rows",
        "a covariance": "pow of a mean, sum or difference of rows",
    }
    assert said.get(kind, "products of rows with other rows") in first[0]
    assert "fabric.all_gather(rows, sync_grads=True)" in first[0]
    assert second == []


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_forward_that_returns_the_loss(ranks, strategy):
    for loss in ("negatives of the batch", "a covariance"):
        first, second = ranks.run(warned, strategy, "", loss=loss, world_size=2)
        assert (len(first), second) == (1, [])
    assert ranks.run(warned, strategy, "", loss="mean", world_size=2) == [[], []]


class Buckets:
    """Batches of several sizes, as buckets of lengths have; a batch sampler without `batch_size`."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        begin = 0
        for size in self.sizes:
            yield [*range(begin, begin + size)]
            begin += size


class Named(BatchSampler):
    """A batch sampler of one's own with a `batch_size`."""


def of_batch_sampler(make, kind):
    """The warnings of a loop whose loader has this batch sampler, or batches as items of its dataset."""
    fabric = launched("ddp")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(36, 4), torch.rand(36, 3))
    model = nn.Linear(4, 3)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loaders = {
        "buckets": lambda: DataLoader(data, batch_sampler=Buckets([4, 4, 9, 9, 5, 5])),
        "named": lambda: DataLoader(data, batch_sampler=Named(range(36), 6, False)),
        "whole": lambda: DataLoader([data[:9], data[9:18], data[18:27], data[27:]], batch_size=None),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in fabric.setup_dataloaders(loaders[make]()):
            optimizer.zero_grad()
            fabric.backward(loss_of(kind, model, x, y, fabric))
            optimizer.step()
    return [str(w.message) for w in caught if w.category is RanksDifferWarning]


@pytest.mark.parametrize("make", ["buckets", "named", "whole"])
def test_own_batch_samplers(ranks, make):
    assert ranks.run(of_batch_sampler, make, "mean", world_size=2) == [[], []]
    first, second = ranks.run(of_batch_sampler, make, "sqrt of a mean", world_size=2)
    assert (len(first), second) == (1 if make == "named" else 0, [])
