"""Verbs with parameters and gradients that are split over ranks: an error, never parts of other places."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, CollectiveMismatch

TEXT = (
    "{} got a DTensor of shape [3, 4], such as a parameter of a sharded model or its gradient. Its elements "
    "are on several ranks, and the verb would combine different ones. fabric.backward has averaged gradients "
    "already. For other tensors write fabric.{}(tensor.full_tensor()) on all ranks."
)
VERBS = {
    "all_reduce": lambda fabric, p: fabric.all_reduce(p.grad),
    "all_gather": lambda fabric, p: fabric.all_gather(p),
    "broadcast": lambda fabric, p: fabric.broadcast({"weight": p}),
    "gather": lambda fabric, p: fabric.gather(p),
    "scatter": lambda fabric, p: fabric.scatter(p),
    "all_gather_object": lambda fabric, p: fabric.all_gather_object([p]),
}


def fabric_of(strategy: str) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def started(strategy: str):
    fabric = fabric_of(strategy)
    model = fabric.setup_module(nn.Linear(4, 3))
    fabric.backward(model(torch.ones(2, 4) * (fabric.global_rank + 1)).sum())
    return fabric, model.weight


def refused(verb: str) -> str:
    fabric, weight = started("fsdp")
    # The others ignore their data under broadcast and scatter.
    with pytest.raises((ArgumentTypeError, CollectiveMismatch)) as caught:
        VERBS[verb](fabric, weight)
    assert fabric.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]  # the group stays usable
    return str(caught.value)


@pytest.mark.parametrize("verb", VERBS)
def test_a_shard_is_refused_on_all_ranks(ranks, verb):
    name = f"{verb}(src=0)" if verb in ("broadcast", "scatter") else verb
    for text in ranks.run(refused, verb, world_size=2):
        assert TEXT.format(name, verb) in text


def whole(strategy: str) -> list[float]:
    fabric, weight = started(strategy)
    full = getattr(weight.grad, "full_tensor", lambda: weight.grad)()
    assert fabric.all_gather(full).shape == (2, 3, 4)
    assert torch.equal(fabric.broadcast({"weight": full})["weight"], full)
    return fabric.all_reduce(full).flatten().tolist()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_whole_tensors_are_as_before(ranks, strategy):
    assert ranks.run(whole, strategy, world_size=2) == [[3.0] * 12] * 2
