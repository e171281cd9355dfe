"""Models that are moved or converted after `setup`."""

from __future__ import annotations

import copy
import gc
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import UsageError
from fabric.strategies import DDPStrategy

STRATEGIES = {
    "ddp": lambda: "ddp",
    "ddp without views": lambda: DDPStrategy(gradient_as_bucket_view=False),
    "ddp_find_unused_parameters_true": lambda: "ddp_find_unused_parameters_true",
    "zero1": lambda: "zero1",
    "zero2": lambda: "zero2",
    "fsdp": lambda: "fsdp",
}


def fabric_of(strategy: str) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES[strategy]())
    fabric.launch()
    return fabric


def train(model, optimizer, backward, x) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(x).pow(2).mean())
        optimizer.step()


def convert_and_train(one, model, optimizer, backward) -> None:
    one.bfloat16().float()
    train(model, optimizer, backward, torch.randn(6, 4))


def ready(fabric: Fabric):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)).eval()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return plain, model, optimizer


def same_place(strategy: str) -> None:
    fabric = fabric_of(strategy)
    x = torch.randn(6, 4)
    _, expected, optimizer = ready(fabric)
    train(expected, optimizer, fabric.backward, x)
    plain, model, optimizer = ready(fabric)
    for one in (model, model.module, plain, plain[0]):
        assert one.to(fabric.device) is one
        one.float().cpu()
    train(model, optimizer, fabric.backward, x)
    found = model.state_dict()
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_device_and_dtype_change_nothing(ranks, strategy):
    ranks.run(same_place, strategy, world_size=2)


def other_dtype(strategy: str) -> None:
    fabric = fabric_of(strategy)
    for trained in (False, True):
        for through in ("wrapper", "module", "user's"):
            plain, model, optimizer = ready(fabric)
            if trained:
                train(model, optimizer, fabric.backward, torch.randn(6, 4))
            one = {"wrapper": model, "module": model.module, "user's": plain}[through]
            with pytest.raises(
                UsageError, match=r"was moved or converted .*Convert the model before"
            ) as info:
                convert_and_train(one, model, optimizer, fabric.backward)
            assert ".weight was" in str(info.value) or ".bias was" in str(info.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_another_dtype_is_refused(ranks, strategy, world_size):
    ranks.run(other_dtype, strategy, world_size=world_size)


def after_training(strategy: str) -> None:
    fabric = fabric_of(strategy)
    _, model, optimizer = ready(fabric)
    train(model, optimizer, fabric.backward, torch.randn(6, 4))
    with fabric.whole(model) as plain:
        if plain is not None:
            assert plain.double()(torch.ones(1, 4).double()).dtype is torch.float64
    if strategy == "ddp":
        assert model.double().module[0].weight.dtype is torch.float64  # to be evaluated or exported


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_is_trained_no_more_may_be_converted(ranks, strategy):
    ranks.run(after_training, strategy, world_size=2)


SHARES = {
    "wrapper": lambda model: model.share_memory(),
    "module": lambda model: model.module.share_memory(),
    "layer": lambda model: model.module[0].share_memory(),
    "parameters": lambda model: [parameter.share_memory_() for parameter in model.parameters()],
}


def shares(strategy: str) -> None:
    fabric, x = fabric_of(strategy), torch.randn(6, 4)
    _, expected, optimizer = ready(fabric)
    train(expected, optimizer, fabric.backward, x)
    for share in SHARES.values():
        _, model, optimizer = ready(fabric)
        if strategy in ("zero2", "fsdp"):
            with pytest.raises(UsageError, match=r"weight is split over ranks.*with fabric\.whole\(model\)"):
                share(model)
        else:
            share(model)
            assert model[0].weight.is_shared()
        train(model, optimizer, fabric.backward, x)
        found = model.state_dict()
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_shared_memory_of_shards_is_refused(ranks, strategy, world_size):
    """torch ends the process in share_memory_() of a DTensor."""
    ranks.run(shares, strategy, world_size=world_size)


def forgotten(strategy: str) -> None:
    fabric = fabric_of(strategy)
    plain, model, optimizer = ready(fabric)
    train(model, optimizer, fabric.backward, torch.randn(6, 4))
    gone = weakref.ref(plain[0].weight), weakref.ref(plain)
    del plain, model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true", "zero1", "fsdp"])
def test_models_that_are_dropped_leave_memory(ranks, strategy):
    ranks.run(forgotten, strategy, world_size=2)


MOVES = {
    "half()": "was converted to torch.float16 after fabric.setup, but its input is torch.float32",
    "to(torch.float64)": "Write Fabric(precision=...), which converts inputs, too.",
    "to('meta')": "was moved to the meta device after fabric.setup, and has no values",
}


@pytest.mark.parametrize("move", MOVES)
def test_a_forward_after_another_dtype_or_the_meta_device_explains_itself(move):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(nn.Sequential(nn.Linear(2, 2)))
    forward, x = vars(model)["forward"], torch.ones(1, 2)
    eval(f"model.{move}", {"model": model, "torch": torch})
    with pytest.raises(UsageError, match=re.escape(MOVES[move])) as raised:
        model(x)
    assert str(raised.value).startswith("model 0 (Sequential)")
    assert isinstance(raised.value.__cause__, RuntimeError)
    if move != "to('meta')":
        assert model(x.to(model.dtype)).dtype == model.dtype
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
            model(torch.ones(1, 3, dtype=model.dtype))
        assert not isinstance(raised.value, UsageError)
        copy.deepcopy(model).double().half().float()(x)
        assert vars(model.double().float())["forward"] is forward, "no cost after the way back"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("move", ["cuda()", "to('cuda')", "to('cuda:1')"])
def test_a_device_that_is_not_there(move):
    model = Fabric(accelerator="cpu", devices=1).setup(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"placed it on cpu\. Delete the call, and choose"):
        eval(f"model.{move}", {"model": model})
    assert model(torch.ones(2)).device.type == "cpu"
