"""Sharded and split models on one and on two devices, over their backend. Skipped, visibly, where there are
none.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerated import DEVICE, KIND, NEEDS_TWO
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fabric import Fabric
from fabric.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    PipelineStrategy,
    ZeRO1Strategy,
)

pytestmark = pytest.mark.gpu


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def split(model, mesh):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh["tensor_parallel"], plan)


STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": ZeRO1Strategy,
    "zero2": partial(FSDPStrategy, sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={nn.Linear}),
    "zero3": partial(FSDPStrategy, auto_wrap_policy={nn.Linear}),
    "offload": partial(FSDPStrategy, cpu_offload=True, auto_wrap_policy={nn.Linear}),
    "tp": partial(ModelParallelStrategy, split, 1, "auto"),
    "pipeline": partial(PipelineStrategy, num_microbatches=2),
}


def train(strategy: str, precision: str = "32-true") -> dict[str, torch.Tensor]:
    devices = dist.get_world_size()
    fabric = Fabric(accelerator=KIND, devices=devices, strategy=STRATEGIES[strategy](), precision=precision)
    fabric.launch()
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
    with DEVICE:
        model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(4, parts, 6, 8, generator=torch.Generator().manual_seed(1))
    for batch in data:
        optimizer.zero_grad()
        model(batch.flatten(0, 1).to(DEVICE)).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_one_device_equals_plain_torch(ranks, strategy, precision):
    (got,) = ranks.run(train, strategy, precision, world_size=1)
    tolerance = 1e-5 if precision == "32-true" else 3e-2
    torch.testing.assert_close(got, train_plain(1), atol=tolerance, rtol=tolerance)


@NEEDS_TWO
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_devices_equal_plain_torch(ranks, strategy):
    expected = train_plain(1 if strategy in ("tp", "pipeline") else 2)
    for got in ranks.run(train, strategy, world_size=2):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@NEEDS_TWO
@pytest.mark.skipif(KIND == "sim", reason="torch splits batches over devices of CUDA only")
def test_dp_equals_plain_torch():
    fabric = Fabric(accelerator=KIND, devices=2, strategy="dp")
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plain = net().to(DEVICE)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    fabric.backward(model(x).pow(2).mean())
    plain(x).pow(2).mean().backward()
    for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=name)
    optimizer.step()


def backends() -> dict[str, str]:
    fabric = Fabric(accelerator=KIND, devices=1, strategy="ddp")
    fabric.launch()
    kinds = ["cpu", KIND]
    return {kind: dist.group.WORLD._get_backend(torch.device(kind)).name() for kind in kinds}


def test_tensors_of_the_device_are_sent_by_its_own_backend(ranks):
    (found,) = ranks.run(backends, world_size=1)
    assert found["cpu"] == "gloo"
    assert found[KIND] == {"cuda": "nccl", "sim": "simnccl"}[KIND]
