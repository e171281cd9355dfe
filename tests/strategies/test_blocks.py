"""Which modules become groups: chosen by itself, by classes, functions, torch's policies; tied weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

from fabric.strategies.sharding.blocks import choose_blocks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Net(nn.Module):
    def __init__(self, width: int = 8, count: int = 3, words: int = 10, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(count)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def names(model: nn.Module, policy) -> list[str]:
    by_module = {module: name for name, module in model.named_modules()}
    return [by_module[module] for module in choose_blocks(model, policy, "auto_wrap_policy")]


def on_meta(make):
    with torch.device("meta"):
        return make()


def test_repeated_blocks_and_large_layers_are_chosen():
    large = on_meta(lambda: Net(512, 4, 50_000, tied=False))
    assert names(large, None) == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    mlp = on_meta(lambda: nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(3)]))
    assert names(mlp, None) == ["0", "1", "2"]
    assert names(Net(), None) == []


def test_tied_layers_stay_with_the_root():
    assert names(on_meta(lambda: Net(512, 2, 50_000)), None) == ["blocks.0", "blocks.1"]
    inside = [[f"blocks.{i}.layers.0", f"blocks.{i}.layers.2", f"blocks.{i}"] for i in range(3)]
    assert names(Net(), {nn.Embedding, nn.Linear, Block}) == [*inside[0], *inside[1], *inside[2]]


POLICIES = {
    "set": {Block},
    "list": [Block],
    "class": Block,
    "function": lambda module: isinstance(module, Block),
    "ModuleWrapPolicy": ModuleWrapPolicy({Block}),
    "CustomPolicy": CustomPolicy(lambda module: isinstance(module, Block)),
    "size": partial(size_based_auto_wrap_policy, min_num_params=700),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_every_kind_of_policy(kind):
    assert names(Net(), POLICIES[kind]) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_module_in_two_places_is_one_group():
    block = Block(8)
    assert names(nn.Sequential(block, nn.ReLU(), block), {Block}) == ["0"]
