"""Methods of nn.Module that the user's class overrides: the wrapper calls the user's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
        self.frozen = nn.Parameter(torch.full((8,), 5.0), requires_grad=False)
        self.merged = False

    def forward(self, x):
        return self.layer(x) + float(self.merged)

    def train(self, mode=True, merge=True):  # as LoRA layers do
        self.merged = merge and not mode
        return super().train(mode)

    def eval(self):
        return self.train(False)

    def parameters(self, recurse=True):
        return (p for p in super().parameters(recurse) if p.requires_grad)

    def named_parameters(self, *args, **kwargs):
        return ((n, p) for n, p in super().named_parameters(*args, **kwargs) if p.requires_grad)

    def requires_grad_(self, requires_grad=True):
        self.layer.requires_grad_(requires_grad)  # never what is frozen
        return self

    def double(self):
        raise RuntimeError("this model is not made for float64")


def used(strategy):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = fabric.setup(Net())
    assert [name for name, _ in model.named_parameters()] == ["layer.0.weight", "layer.0.bias"]
    assert len(list(model.parameters())) == 2
    for mine in (model, copy.deepcopy(model)) if strategy == "ddp" else (model,):
        assert mine.eval() is mine
        assert mine.module.merged
        modes = [mine, mine._forward_module, mine.module, *mine.module.modules()]
        assert {part.training for part in modes} == {False}
        assert mine.train() is mine
        assert not mine.module.merged
        assert {part.training for part in modes} == {True}
        assert mine.train(False, merge=False) is mine
        assert not mine.module.merged
        assert {part.training for part in modes} == {False}
    assert model.requires_grad_(False).requires_grad_() is model
    assert not model.module.frozen.requires_grad
    with pytest.raises(RuntimeError, match="not made for float64"):
        model.double()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_the_users_methods_are_called(ranks, strategy, world):
    ranks.run(used, strategy, world_size=world)


def test_methods_that_are_not_overridden_are_torchs():
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model = fabric.setup(nn.Linear(2, 2))
    assert model.eval() is model.cpu() is model.float() is model
    assert model.training is model.module.training is False
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
