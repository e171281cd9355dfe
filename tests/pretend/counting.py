"""What tests of the pretend accelerator share: a Fabric on its ranks, and bytes of this rank's device."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric

WIDTH, DEPTH = 512, 8
LAYER = WIDTH * WIDTH * 4
"""Bytes of one block's weight."""


def fabric_of(strategy: Any, **kwargs: Any) -> Fabric:
    fabric = Fabric(accelerator="sim", devices=dist.get_world_size(), strategy=strategy, **kwargs)
    fabric.launch()
    return fabric


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.relu(self.inner(x))


def net(depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[Block() for _ in range(depth)], nn.Linear(WIDTH, 4))


def size_of(module: nn.Module) -> int:
    return sum([p.numel() * p.element_size() for p in module.parameters()])


class Peak:
    """Bytes on this rank's device: `most` at once in a block, beyond what was there before; `now` when it
    ended.
    """

    most = now = 0


@contextmanager
def peak():
    gc.collect()
    found = Peak()
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    yield found
    gc.collect()
    found.most = torch.sim.max_memory_allocated() - before
    found.now = torch.sim.memory_allocated() - before
