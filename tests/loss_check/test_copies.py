"""Copies of a model whose first steps are recorded: they pickle, and their calls are not recorded."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.loss_check.record import _RecordingForward


def copies(strategy, done):
    """Whether the model, a copy and an unpickled copy record calls after `done` steps, and their outputs."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 4)
    for _ in range(done):
        optimizer.zero_grad()
        fabric.backward(model(x + fabric.global_rank).square().mean())
        optimizer.step()
    models = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    forwards = [vars(each)["forward"] for each in models]
    return [isinstance(forward, _RecordingForward) for forward in forwards], [each(x) for each in models]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_copy_of_a_recorded_model_is_not_recorded(ranks, strategy, done):
    for recorded, outputs in ranks.run(copies, strategy, done, world_size=2):
        assert recorded == [done < 2, False, False]
        torch.testing.assert_close(outputs, outputs[:1] * 3)
