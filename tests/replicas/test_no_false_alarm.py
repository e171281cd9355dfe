"""Loops whose replicas are equal whenever it matters: the replica check lets them run."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.core.errors import ReplicasDivergedError

STRATEGIES = ["ddp", "zero1", "fsdp"]
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def normalised(last):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, last))


def started(strategy, *modules):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, replica_check=1)
    fabric.launch()
    pairs = [fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.01)) for module in modules]
    return fabric, X[fabric.global_rank :: fabric.world_size], *pairs


def gan(strategy, freezes):
    torch.manual_seed(0)
    fabric, x, (made, of_made), (judge, of_judge) = started(strategy, normalised(4), normalised(1))
    for _ in range(4):
        of_judge.zero_grad()
        fabric.backward(judge(x).pow(2).mean() + (judge(made(x).detach()) - 1).pow(2).mean())
        of_judge.step()
        judge.requires_grad_(not freezes)
        of_made.zero_grad()
        fabric.backward(judge(made(x)).pow(2).mean())
        of_made.step()
        judge.requires_grad_(True)


def mean_teacher(strategy, in_training):
    torch.manual_seed(0)
    student, teacher = normalised(1), normalised(1)
    fabric, x, (student, optimizer) = started(strategy, student)
    teacher = fabric.setup(teacher)
    teacher.train(in_training)
    for _ in range(4):
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        fabric.backward((student(x) - target).pow(2).mean())
        optimizer.step()


def evaluated_before_backward(strategy, _):
    torch.manual_seed(0)
    fabric, x, (model, optimizer) = started(strategy, normalised(1))
    for _ in range(4):
        model.train()
        y = model(x)
        model.eval()
        optimizer.zero_grad()
        fabric.backward(y.pow(2).mean())
        optimizer.step()


def forward_before_step(strategy, two_models):
    """A forward in training mode between a backward and its step, as for a metric of the batch."""
    torch.manual_seed(0)
    fabric, x, (model, optimizer) = started(strategy, normalised(1))
    other = fabric.setup(normalised(1)) if two_models else None
    for _ in range(4):
        optimizer.zero_grad()
        fabric.backward(model(x).pow(2).mean())
        if other is not None:
            fabric.backward(other(x).pow(2).mean())
        with torch.no_grad():
            model(x + 1)
        optimizer.step()


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("loop", [gan, mean_teacher, evaluated_before_backward, forward_before_step])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_norm_of_a_model_that_the_backward_leaves_alone(ranks, loop, strategy, flag):
    ranks.run(loop, strategy, flag, world_size=3 if strategy == "ddp" else 2)


def validated_on_rank_zero():
    torch.manual_seed(0)
    fabric, _, (model, optimizer) = started("ddp", nn.Linear(4, 1))
    data = TensorDataset(X)
    train = fabric.setup_dataloaders(DataLoader(data, batch_size=1))
    held_out = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
    with torch.no_grad():
        batches = iter(held_out) if fabric.is_global_zero else None
    for (x,) in train:
        optimizer.zero_grad()
        fabric.backward(model(x).pow(2).mean())
        optimizer.step()
        if batches is not None:
            next(batches, None)
    fabric.barrier()


def test_an_iteration_of_one_rank_inside_of_an_epoch(ranks):
    ranks.run(validated_on_rank_zero, world_size=2)


def swapped(strategy, restores):
    """Rank zero evaluates averaged weights before the third step."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, replica_check=1000)
    fabric.launch()
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    average = {name: torch.full_like(value, 0.3) for name, value in module.state_dict().items()}
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = X[fabric.global_rank :: 2]
    for number in range(5):
        if number == 3 and fabric.is_global_zero:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            if restores:
                model.load_state_dict(kept)
        optimizer.zero_grad()
        fabric.backward(model(x).pow(2).mean())
        try:
            optimizer.step()
        except ReplicasDivergedError as error:
            return number, str(error)
    return None


def test_weights_that_rank_zero_swaps_and_restores(ranks):
    assert ranks.run(swapped, "zero1", True, world_size=2) == [None, None]


def test_zero1_weights_that_rank_zero_alone_has_changed(ranks):
    first, second = ranks.run(swapped, "zero1", False, world_size=2)
    assert first == second
    number, text = first
    assert number == 3
    assert text.startswith(
        "Parameters of optimizer 0 (SGD) were changed on some ranks only (0: 4 | 1: 0 in-place changes). It "
        "arose between optimizer steps 2 and 3"
    )
