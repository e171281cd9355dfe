"""Sharded and split models on one and on two CUDA devices, over NCCL. Skipped, visibly, where there are
none.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fabric import Fabric
from fabric.strategies import FSDPStrategy, ModelParallelStrategy, PipelineStrategy, ZeRO1Strategy

pytestmark = pytest.mark.gpu

NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def split(model, mesh):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh["tensor_parallel"], plan)


SPAWNED = {"start_method": "spawn", "process_group_backend": None}
STRATEGIES = {
    "zero1": partial(ZeRO1Strategy, **SPAWNED),
    "zero2": partial(
        FSDPStrategy, sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={nn.Linear}, **SPAWNED
    ),
    "zero3": partial(FSDPStrategy, auto_wrap_policy={nn.Linear}, **SPAWNED),
    "offload": partial(FSDPStrategy, cpu_offload=True, auto_wrap_policy={nn.Linear}, **SPAWNED),
    "tp": partial(ModelParallelStrategy, split, 1, "auto", **SPAWNED),
    "pipeline": partial(PipelineStrategy, num_microbatches=2, **SPAWNED),
}


def launch(strategy: str, devices: int, precision: str = "32-true", accelerator: str = "cuda"):
    fabric = Fabric(
        accelerator=accelerator, devices=devices, strategy=STRATEGIES[strategy](), precision=precision
    )
    return fabric.launch(train, strategy)


def train(fabric: Fabric, strategy: str) -> dict[str, torch.Tensor]:
    with fabric.init_module(empty_init=strategy in ("zero2", "zero3", "tp")):
        model = net()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    part = fabric.strategy.distributed_sampler_kwargs
    data = torch.randn(4, part["num_replicas"], 6, 8, generator=torch.Generator().manual_seed(1))
    for batch in data[:, part["rank"]]:
        optimizer.zero_grad()
        fabric.backward(model(fabric.to_device(batch)).pow(2).mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
    return {name: value.float().cpu() for name, value in fabric.strategy.get_module_state_dict(model).items()}


def train_plain(parts: int) -> dict[str, torch.Tensor]:
    with torch.device("cuda"):
        model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(4, parts, 6, 8, generator=torch.Generator().manual_seed(1))
    for batch in data:
        optimizer.zero_grad()
        model(batch.flatten(0, 1).cuda()).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_one_device_equals_plain_torch(strategy, precision):
    got = launch(strategy, 1, precision)
    tolerance = 1e-5 if precision == "32-true" else 3e-2
    torch.testing.assert_close(got, train_plain(1), atol=tolerance, rtol=tolerance)


@NEEDS_TWO
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_devices_equal_plain_torch(strategy):
    expected = train_plain(1 if strategy in ("tp", "pipeline") else 2)
    torch.testing.assert_close(launch(strategy, 2), expected, atol=1e-5, rtol=1e-5)


@NEEDS_TWO
def test_dp_equals_plain_torch():
    fabric = Fabric(accelerator="cuda", devices=2, strategy="dp")
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = net().cuda()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).cuda()
    fabric.backward(model(x).pow(2).mean())
    plain(x).pow(2).mean().backward()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=name)
    optimizer.step()
