"""Writes into `state_dict()` of models: the parameters change, or there is an error."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError

TEXT = (
    "2.bias of a state_dict() of model 1 (Sequential) was written. The model is split over ranks, so "
    "state_dict() returned copies, and the model has not changed. Write model.load_state_dict(state) after "
    "the writes, or change its parameters: for p, q in zip(average.parameters(), model.parameters()): "
    "p.lerp_(q, 0.1)."
)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


class Loop:
    def __init__(self, strategy: str | None) -> None:
        model, self.average = net(0), net(1).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.rows = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        if strategy is None:
            self.model, self.optimizer, self.backward = model, optimizer, torch.Tensor.backward
            return
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.average, self.backward = fabric.setup_module(self.average), fabric.backward
        self.rows = self.rows[fabric.global_rank :: fabric.world_size]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward(self.model(self.rows).square().mean())
        self.optimizer.step()


@torch.no_grad()
def written(loop: Loop) -> None:
    state = loop.model.state_dict()
    for name, value in loop.average.state_dict().items():
        value.copy_(value * 0.5 + state[name] * 0.5)


def in_each_step(loop: Loop) -> None:
    for _ in range(3):
        loop.step()
        written(loop)


def before_an_evaluation(loop: Loop) -> None:
    loop.step()
    written(loop)
    with torch.no_grad():
        loop.average(loop.rows)


@torch.no_grad()
def loaded(loop: Loop) -> None:
    """Reads and copies of states; written ones are loaded before the next use."""
    for _ in range(3):
        state = loop.average.state_dict()
        for name, value in loop.model.state_dict().items():
            state[name].lerp_(value, 0.5)
        loop.average.load_state_dict(state)
        best = copy.deepcopy(loop.average.state_dict())
        best["0.bias"].zero_()
        kept = {name: value.clone().mul_(2) for name, value in loop.average.state_dict().items()}
        with torch.enable_grad():
            loop.step()
        loop.average(loop.rows)
        target = loop.average.state_dict()
        target["0.bias"] = target["0.bias"] * 0.5 + kept["0.bias"]
        loop.average.load_state_dict(target)


@torch.no_grad()
def parameters(loop: Loop) -> None:
    for _ in range(3):
        with torch.enable_grad():
            loop.step()
        for old, new in zip(loop.average.parameters(), loop.model.parameters(), strict=True):
            old.lerp_(new, 0.5)
        loop.average.state_dict()


def compared(strategy: str, program) -> None:
    plain, loop = Loop(None), Loop(strategy)
    program(plain)
    program(loop)
    for ours, theirs in ((loop.model, plain.model), (loop.average, plain.average)):
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("program", [loaded, parameters])
def test_what_is_loaded_or_read_is_right(ranks, strategy, program):
    ranks.run(compared, strategy, program, world_size=2)


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("program", [in_each_step, before_an_evaluation])
def test_replicated_models_change_with_their_states(ranks, strategy, program):
    ranks.run(compared, strategy, program, world_size=2)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("program", [in_each_step, before_an_evaluation])
def test_a_state_that_was_written_and_not_loaded_is_an_error(ranks, strategy, program):
    for error in ranks.run_expecting_errors(compared, strategy, program, world_size=2):
        assert isinstance(error, UsageError)
        assert str(error) == TEXT
