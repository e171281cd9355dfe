"""What tests of checkpoints share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ModelParallelStrategy, PipelineStrategy


class Scaled(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return super().forward(x) * self.scale


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6), Scaled(6, 5))


def over_ranks(model, mesh):
    parallelize_module(model, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if mesh["data_parallel"].size() > 1:
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


SPECIAL = {
    "single": lambda: "auto",
    "hsdp": lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
    "tp": lambda: ModelParallelStrategy(over_ranks, data_parallel_size=1),
    "tp-fsdp": lambda: ModelParallelStrategy(over_ranks, data_parallel_size=2, tensor_parallel_size=2),
    "pipeline": lambda: PipelineStrategy(num_stages=2, num_microbatches=2),
}


def launched(name, **kwargs):
    strategy = SPECIAL.get(name, lambda: name)()
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **kwargs)
    fabric.launch()
    return fabric


def same(got, expected):
    """Equal to the bit, in containers of the same kinds and order."""
    assert type(got) is type(expected), (got, expected)
    if isinstance(got, dict):
        assert list(got) == list(expected)
        [same(got[key], value) for key, value in expected.items()]
        assert getattr(got, "_metadata", None) == getattr(expected, "_metadata", None)
    elif isinstance(got, list | tuple):
        assert len(got) == len(expected)
        [same(one, other) for one, other in zip(got, expected, strict=True)]
    elif isinstance(got, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    else:
        assert got == expected


def failure(fabric, verb, *args, **kwargs):
    """(kind, text) of what the call raises here; the group must be usable afterwards."""
    try:
        getattr(fabric, verb)(*args, **kwargs)
    except Exception as error:
        told = type(error).__name__, str(error)
    else:
        told = None
    assert fabric.all_reduce(torch.tensor(1.0), reduce_op="sum") == fabric.world_size
    return told
