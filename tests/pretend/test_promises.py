"""Every strategy keeps the contract on devices that are not the CPU."""

import pytest
import torch

from fabric import Fabric
from fabric.core.errors import ConfigurationError
from fabric.strategies import STRATEGY_REGISTRY, LocalSGDStrategy
from fabric.testing import RankFailure, RankPool, check_strategy

# Those that differ in more than how they start processes; less the two that run on CUDA only, and engines of
# others.
NAMES = ("ddp", "fsdp", "fsdp_cpu_offload", "hsdp", "pipeline", "single_device", "zero1", "zero2")


def test_no_strategy_is_left_out():
    forms = {name for name in STRATEGY_REGISTRY.names() if name.startswith("ddp_")}
    names = {
        name
        for name in STRATEGY_REGISTRY.names()
        if "integrations" not in str(STRATEGY_REGISTRY.entry(name).factory)
    }
    assert names - forms == {*NAMES, "dp", "ddp2", "zero3", "local_sgd"}


@pytest.mark.parametrize("strategy", ["dp", "ddp2"])
def test_batches_are_split_over_devices_of_cuda_only(strategy):
    with pytest.raises(ConfigurationError, match=rf"strategy='{strategy}' runs on cpu, cuda, mps only"):
        Fabric(accelerator="sim", devices=2, strategy=strategy)


@pytest.mark.parametrize("strategy", NAMES)
def test_every_strategy(ranks, strategy):
    check_strategy(strategy, accelerator="sim", pool=ranks)


def alike_after_each_step():
    return LocalSGDStrategy(sync_every=1)


def test_local_sgd(ranks):
    check_strategy(alike_after_each_step, accelerator="sim", pool=ranks)


def device_of_rank():
    return torch.accelerator.current_device_index(), torch.distributed.get_backend_config()


def test_ranks_of_a_pool_take_a_device_each(ranks):
    assert ranks.run(device_of_rank, world_size=3) == [(i, "cpu:gloo,sim:simnccl") for i in range(3)]


def test_a_pool_of_another_accelerator_is_refused(ranks):
    with pytest.raises(
        ConfigurationError, match=r"use accelerator='sim', .* Write RankPool\(accelerator='cpu'\)"
    ):
        check_strategy("ddp", pool=ranks)


def test_more_ranks_than_devices():
    with (
        RankPool(5, accelerator="sim") as pool,
        pytest.raises(RankFailure, match="devices=5 cannot be used: each process needs a device of its own"),
    ):
        pool.run(device_of_rank)
