"""Random losses of rows: what the loss check says of their graphs is true of their gradients.

The oracle: a loss is a sum over rows if another first row leaves the gradients of all other rows as they are.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from fabric.core._torch import node_number
from fabric.loss_check.nonlinear import nonlinear_part

ROWS, WIDTH = 5, 6
STEPS = {
    "sin": lambda x, rng: x.sin(),
    "square": lambda x, rng: x.square(),
    "abs": lambda x, rng: x.abs(),
    "exp": lambda x, rng: (0.1 * x).exp(),
    "scaled": lambda x, rng: x * 0.5 + 1,
    "weights": lambda x, rng: x * torch.linspace(0.5, 2, x.shape[-1]).to(x),
    "halves": lambda x, rng: x[..., : x.shape[-1] // 2],
    "first": lambda x, rng: x[..., 0],
    "flip": lambda x, rng: x.flip(-1),
    "transpose": lambda x, rng: x.transpose(dim_of(x, rng), dim_of(x, rng)),
    "permute": lambda x, rng: x.permute(*rng.sample(range(x.dim()), x.dim())),
    "unsqueeze": lambda x, rng: x.unsqueeze(rng.randint(0, x.dim())),
    "squeeze": lambda x, rng: x.squeeze(),
    "flatten": lambda x, rng: x.flatten(*sorted([dim_of(x, rng), dim_of(x, rng)])),
    "unflatten": lambda x, rng: x.unflatten(-1, (x.shape[-1] // 2, 2)),
    "expand": lambda x, rng: x.expand(3, *x.shape),
    "stack": lambda x, rng: torch.stack([x, x.cos()], rng.randint(0, x.dim())),
    "cat": lambda x, rng: torch.cat([x, x.cos()], dim_of(x, rng)),
    "chunk": lambda x, rng: x.chunk(2, dim_of(x, rng))[-1],
    "softmax": lambda x, rng: x.softmax(dim_of(x, rng)),
    "log_softmax": lambda x, rng: x.log_softmax(-1),
    "cumsum": lambda x, rng: x.cumsum(dim_of(x, rng)),
    "sum": lambda x, rng: x.sum(dim_of(x, rng), keepdim=rng.random() < 0.3),
    "mean": lambda x, rng: x.mean(rng.sample(range(x.dim()), rng.randint(1, x.dim()))),
    "mean of all": lambda x, rng: x.mean(),
    "norm": lambda x, rng: x.norm(dim=dim_of(x, rng)),
    "logsumexp": lambda x, rng: x.logsumexp(dim_of(x, rng)),
    "max": lambda x, rng: x.amax(dim_of(x, rng)),
    "topk": lambda x, rng: x.topk(1, dim_of(x, rng)).values,
    "var": lambda x, rng: x.var(dim_of(x, rng), correction=0),
    "normalize": lambda x, rng: functional.normalize(x, dim=dim_of(x, rng)),
    "centred": lambda x, rng: x - x.mean(dim_of(x, rng), keepdim=True),
    "gram": lambda x, rng: x @ x.transpose(-1, -2),
    "gram of columns": lambda x, rng: x.transpose(-1, -2) @ x,
    "linear": lambda x, rng: functional.linear(x, torch.ones(3, x.shape[-1]).to(x)),
    "outer": lambda x, rng: x[..., :, None] * x[..., None, :],
    "differences": lambda x, rng: x[:, None] - x[None],
    "cdist": lambda x, rng: torch.cdist(x, x.cos()),
    "einsum": lambda x, rng: torch.einsum("bd,cd->bc", x, x),
    "sum with itself": lambda x, rng: x + x.sin(),
    "product with itself": lambda x, rng: x * x.cos(),
    "quotient": lambda x, rng: x / (2 + x.square()),
    "product with the mean": lambda x, rng: x * x.mean(),
    "mse": lambda x, rng: functional.mse_loss(x, torch.ones_like(x)),
}


def dim_of(x, rng):
    return rng.randrange(x.dim())


def loss_of(out, seed):
    """A random loss of an output, and the names of its steps."""
    rng = random.Random(seed)
    x, names, weights = out, rng.choices([*STEPS], k=rng.randint(1, 5)), torch.Generator().manual_seed(seed)
    for name in names:
        try:
            after = STEPS[name](x, rng)
        except (IndexError, RuntimeError, TypeError, ValueError):  # it needs other dimensions
            continue
        if after.numel() and after.numel() < 5_000 and after.dim() < 5:
            x = after * torch.randn(after.shape, generator=weights, dtype=x.dtype)  # else rows may cancel
    return x.sum() if rng.random() < 0.5 else x.square().mean(), names


def is_sum_over_rows(shape, seed):
    """Whether gradients of other rows stay, for another first row; None: they are not finite."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(shape, generator=generator, dtype=torch.float64)
    grads = []
    for scale in (1.0, -3.0, 40.0, -40.0):
        leaf = torch.cat([scale * first[:1], first[1:]]).requires_grad_()
        loss_of(leaf * 1, seed)[0].backward()
        grads.append(leaf.grad[1:])
    if not all([grad.isfinite().all() for grad in grads]) or not grads[0].any():
        return None
    return all([torch.allclose(grad, grads[0], rtol=1e-6, atol=1e-9) for grad in grads])


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (ROWS, 3, WIDTH)], ids=str)
def test_what_the_check_says_is_true(shape):
    wrong, said, owed = [], 0, 0
    for seed in range(1_500):
        out = torch.randn(shape, dtype=torch.float64, requires_grad=True) * 1
        loss, names = loss_of(out, seed)
        if loss.grad_fn is None:
            continue
        kind = nonlinear_part(loss.grad_fn, {node_number(out.grad_fn)}, ROWS)
        is_sum = is_sum_over_rows(shape, seed)
        owed += is_sum is False
        said += is_sum is False and bool(kind)
        if kind and is_sum:
            wrong.append((seed, names, kind))
    # By coincidence: a row that is never the largest, a norm of one number.
    assert len(wrong) < 0.03 * said, wrong
    assert said > 0.98 * owed, f"{said} of {owed}"
