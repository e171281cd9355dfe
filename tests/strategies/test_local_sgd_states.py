"""strategy="local_sgd": what ranks know differently of their optimizers is one state after a save."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, RMSprop

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.strategies import LocalSGDStrategy
from fabric.wrappers import unwrap

WORLD = 2
OPTIMIZERS = {
    "adam": partial(Adam, lr=0.05),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.5),
    "lbfgs": partial(LBFGS, lr=0.1, max_iter=3, history_size=2),
}


class Experts(nn.Module):
    """Four of one shape, of which a forward uses one: rank and step decide; the last one is never used."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(4)])
        with torch.no_grad():
            [expert.weight.fill_(0.1 * n + 0.1) for n, expert in enumerate(self.experts)]

    def forward(self, x, which):
        return self.experts[which](x)


def launched(outer=None, strategy=None, precision=None):
    outside = partial(SGD, lr=0.7, momentum=0.9, nesterov=True) if outer else None
    strategy = strategy or LocalSGDStrategy(4, outer_optimizer=outside)
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def ready(fabric, kind):
    model = Experts()
    return fabric.setup(model, OPTIMIZERS[kind](model.parameters()))


def used(step, rank):
    """The first two in another order on each rank; the third on rank one only."""
    return 2 if rank and step % 3 == 2 else (step + rank) % 2


def train(fabric, model, optimizer, steps, factor=1.0):
    rank = fabric.global_rank
    for step in steps:

        def closure(step=step):
            optimizer.zero_grad()
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = (model(x, used(step, rank)) * factor).pow(2).mean()
            fabric.backward(loss)
            return loss

        if isinstance(unwrap(optimizer), LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def found(model, optimizer):
    entries = [unwrap(optimizer).state.get(p, {}) for p in model.parameters()]
    return [p.detach().clone() for p in model.parameters()], [dict(entry) for entry in entries]


def saved(path, kind, outer, format, other):
    fabric = launched(outer)
    model, optimizer = ready(fabric, kind)
    train(fabric, model, optimizer, range(6))
    apart = [dict(unwrap(optimizer).state.get(p, {})) for p in model.parameters()]
    apart = [{k: v.clone() if torch.is_tensor(v) else v for k, v in entry.items()} for entry in apart]
    fabric.save(path, {"model": model, "optimizer": optimizer}, format=format)
    together = found(model, optimizer)
    together = torch.utils._pytree.tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, together)
    train(fabric, model, optimizer, range(6, 11))
    went_on = found(model, optimizer)[0]
    fabric = launched(outer, other)
    model, optimizer = ready(fabric, kind)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, range(6, 11))
    return apart, together, went_on, found(model, optimizer)[0]


@pytest.mark.parametrize("format", ["full", "sharded"])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_run_goes_on_as_the_one_that_was_saved(ranks, tmp_path, kind, outer, format):
    for _, _, went_on, resumed in ranks.run(
        saved, tmp_path / "c", kind, outer, format, None, world_size=WORLD
    ):
        for one, other in zip(went_on, resumed, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_moments_are_means_of_the_ranks_that_have_them(ranks, tmp_path, kind):
    zero, one = ranks.run(saved, tmp_path / "c", kind, False, "full", None, world_size=WORLD)
    for place, (a, b) in enumerate(zip(zero[0], one[0], strict=True)):
        having = [entry for entry in (a, b) if entry]
        assert len(having) == [2, 2, 1, 0][place]
        for rank in (zero, one):
            entry = rank[1][1][place]
            assert entry.keys() == (having[0].keys() if having else set())
            for key, value in entry.items():
                is_moment = value.dim() > 0
                mean = torch.stack([h[key] for h in having]).mean(0) if is_moment else having[0][key]
                torch.testing.assert_close(value, mean)
    torch.testing.assert_close(zero[1], one[1], rtol=0, atol=0)


@pytest.mark.parametrize("outer", [False, True])
def test_another_strategy_reads_what_has_parameters_that_no_step_moved(ranks, tmp_path, outer):
    for _, _, _, resumed in ranks.run(
        saved, tmp_path / "c", "adam", outer, "full", "ddp_find_unused_parameters_true", world_size=WORLD
    ):
        assert all(torch.isfinite(p).all() for p in resumed)


def skipped(path, steps):
    fabric = launched(precision="16-mixed")
    model, optimizer = ready(fabric, "adam")
    train(fabric, model, optimizer, range(steps), factor=1e30 if fabric.global_rank else 1.0)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    together = found(model, optimizer)
    return together[0], [entry.get("step") for entry in together[1]]


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_rank_that_skipped_its_steps_has_the_same_state(ranks, tmp_path, steps):
    zero, one = ranks.run(skipped, tmp_path / "c", steps, world_size=WORLD)
    torch.testing.assert_close(zero[0], one[0], rtol=0, atol=0)
    assert zero[1] == one[1]
    assert zero[1][0] is not None


def unused_on_a_rank(path):
    fabric = launched(outer=True)
    model, optimizer = ready(fabric, "adam")
    if fabric.global_rank:
        train(fabric, model, optimizer, range(2))
    fabric.save(path, {"model": model, "optimizer": optimizer})
    return found(model, optimizer)


def test_a_rank_that_took_no_step_takes_part_in_a_save(ranks, tmp_path):
    zero, one = ranks.run(unused_on_a_rank, tmp_path / "c", world_size=WORLD)
    torch.testing.assert_close(zero, one, rtol=0, atol=0)
    assert not torch.equal(zero[0][0], Experts().experts[0].weight)


def stepped_past():
    fabric = launched()
    model = Experts()
    raw = SGD(model.parameters(), lr=0.1)
    model, _ = fabric.setup(model, raw)
    fabric.backward(model(torch.ones(1, 3), 0).sum())
    raw.step()


def test_the_optimizer_that_was_given_takes_no_steps_of_its_own(ranks):
    for error in ranks.run_expecting_errors(stepped_past, world_size=WORLD):
        assert isinstance(error, UsageError)
        assert "SGD.step() was called on an optimizer that setup did not return" in str(error)
