"""Graphs of losses of rows: none is said to be across rows, and no graph makes the analysis fail."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fabric.core._torch import node_number
from fabric.loss_check.nonlinear import nonlinear_part

ROWS = 8
POWERS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def spectrum(out):
    return torch.stft(out.repeat(1, 16), 16, return_complex=True, window=torch.hann_window(16)).abs()


def deep(out):
    for _ in range(400):
        out = out.sin()
    return out.mean()


def nested(out):
    return torch.nested.as_nested_tensor([*out]).sin().to_padded_tensor(0.0).mean()


def checkpointed(out):
    return checkpoint(lambda x: (x.abs() ** POWERS).mean(1), out, use_reentrant=False).mean()


OF_ROWS = {
    "label smoothing": lambda out: functional.cross_entropy(out, torch.arange(ROWS) % 4, label_smoothing=0.1),
    "a mean divided by a number": lambda out: torch.ops.aten.div.Scalar(out.mean(), 2),
    "powers": lambda out: (out.abs() ** POWERS).mean(),
    "powers of a checkpoint": checkpointed,
    "windows": lambda out: out.unfold(1, 2, 1).norm(dim=(1, 2)).mean(),
    "matrices": lambda out: torch.diag_embed(out).norm(dim=(1, 2)).mean(),
    "complex numbers as pairs": lambda out: torch.view_as_real(torch.fft.rfft(out)).norm(dim=(1, 2)).mean(),
    "strides": lambda out: out.as_strided((ROWS, 2, 2), (4, 2, 1)).norm(dim=(1, 2)).mean(),
    "spectra": lambda out: spectrum(out).norm(dim=(1, 2)).mean(),
    "repeated rows": lambda out: out.repeat(3, 1).view(3, ROWS, 4).norm(dim=0).mean(),
    "nested tensors": nested,
    "a deep graph": deep,
}


@pytest.mark.parametrize("kind", OF_ROWS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_loss_of_rows_has_no_operation_across_rows(kind):
    out = torch.randn(ROWS, 4, requires_grad=True) * 1
    loss = below_frames(120, OF_ROWS[kind], out)
    assert below_frames(120, nonlinear_part, loss.grad_fn, {node_number(out.grad_fn)}, ROWS) == ""


def test_the_mean_of_two_views_is_of_rows():
    out = torch.randn(2 * ROWS, 4, requires_grad=True) * 1
    views = out.view(2, ROWS, 4)
    for loss in (functional.cross_entropy(views.mean(0), torch.arange(ROWS) % 4), views.logsumexp(0).mean()):
        assert nonlinear_part(loss.grad_fn, {node_number(out.grad_fn)}, ROWS) == ""
    pairs = functional.cross_entropy(views[0] @ views[1].T, torch.arange(ROWS))
    assert nonlinear_part(pairs.grad_fn, {node_number(out.grad_fn)}, ROWS) != ""


def test_a_loop_over_more_rows_than_are_read():
    out = torch.randn(128, 4, requires_grad=True) * 1
    rows = [((out - 1).square().mean(1) * mask).sum().sqrt() for mask in torch.eye(128)]
    assert nonlinear_part(sum(rows).grad_fn, {node_number(out.grad_fn)}, 128) == ""


@pytest.mark.parametrize("power", [POWERS, POWERS[1]])
def test_a_power_of_a_mean_is_no_mean_over_rows(power):
    out = torch.randn(ROWS, 4, requires_grad=True) * 1
    loss = (out.mean() ** power).sum()
    found = nonlinear_part(loss.grad_fn, {node_number(out.grad_fn)}, ROWS)
    assert found == "pow of a mean, sum or difference of rows"


def below_frames(count, run, *args):
    """Call below as many frames as a trainer's command line may have."""
    return below_frames(count - 1, run, *args) if count else run(*args)
