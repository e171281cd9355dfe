"""Backwards that reach no set-up model belong to their rank: ranks may make different numbers of them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.utilities.warnings import RanksDifferWarning

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def steps(fabric, when, free):
    """Three steps on this rank's rows; returns the gradients of the last one, and the warnings."""
    torch.manual_seed(0)
    model, prompt = nn.Linear(4, 1), nn.Parameter(torch.ones(4))
    rank, ranks, backward, optimizers = 0, 1, torch.Tensor.backward, []
    if fabric is not None:
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
        optimizers = [optimizer, fabric.setup_optimizers(torch.optim.SGD([prompt], lr=0.0))]
        rank, ranks, backward = fabric.global_rank, fabric.world_size, fabric.backward
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for _ in range(rank if when in ("always", step) else 0):
                (torch.ones(3, requires_grad=True) * 2).sum().backward()
            model.zero_grad()
            prompt.grad = None
            backward(model(X[rank::ranks] * (prompt if free else 1)).square().mean())
            for optimizer in optimizers:
                optimizer.step()
    grads = [model.weight.grad, prompt.grad if free else torch.zeros(4)]
    grads = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
    return grads, [str(w.message) for w in caught if w.category is RanksDifferWarning]


def launched_steps(strategy, when, free):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return steps(fabric, when, free)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("when", [0, 1, "always"])
@pytest.mark.parametrize("free", [False, True])
def test_ranks_make_different_numbers_of_own_backwards(ranks, strategy, when, free):
    expected, _ = steps(None, when, free)
    for grads, told in ranks.run(launched_steps, strategy, when, free, world_size=2):
        torch.testing.assert_close(grads, expected)
        assert told == []
