"""Collectives on tensors of a device: they arrive on the receiver's own, NaN stays, the host waits for
nothing.
"""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from counting import fabric_of, net
from sim import HostSyncs
from torch import nn

from fabric.core.errors import CollectiveMismatch
from fabric.strategies import DDPStrategy, FSDPStrategy, PipelineStrategy

NAN = math.nan


def objects():
    fabric = fabric_of("ddp")
    rank, device = fabric.global_rank, fabric.device
    weight = nn.Parameter(torch.full((2,), float(rank), device=device))
    host = torch.arange(3)
    given = {
        "loss": torch.ones(2, device=device) * rank,
        "weight": weight,
        "host": host,
        "f8": host.to(torch.float8_e5m2),
    }
    large = torch.full((5000,), rank, device=device)
    for gathered in (fabric.all_gather_object(given), fabric.all_gather_object([given, large])):
        for src, got in enumerate(gathered):
            got, *rest = got if isinstance(got, list) else [got]
            assert got["loss"].device == got["weight"].device == device
            assert got["loss"].tolist() == got["weight"].tolist() == [src, src]
            assert isinstance(got["weight"], nn.Parameter)
            assert got["weight"].requires_grad
            assert got["host"].device == got["f8"].device == torch.device("cpu")
            assert got["f8"].dtype == torch.float8_e5m2
            assert all([one.device == device and (one == src).all() for one in rest])
    assert fabric.agree(torch.ones(2, device=device)).device == device
    with pytest.raises(CollectiveMismatch, match=r"rank 1: tensor\(\[1., 1.\]"):
        fabric.agree(torch.ones(2, device=device) * rank)
    told = fabric.broadcast(given if rank == 1 else None, src=1)
    assert told["loss"].device == device
    if rank:  # nobody else has memory on this device
        assert torch.sim.memory_allocated(0) == 0


def test_objects_arrive_on_the_receivers_own_device(ranks):
    ranks.run(objects, world_size=2)


def groups(strategy):
    fabric = fabric_of(strategy())
    mine = dist.new_group([0, 1], backend="simnccl")
    rank, device = fabric.global_rank, fabric.device
    for at in ("cpu", device):
        x = torch.ones(3, device=at) * (rank + 1)
        got = fabric.all_reduce(x.clone(), group=mine, reduce_op="sum")
        assert got.tolist() == [3.0] * 3
        assert got.device == torch.device(at)
        large = torch.ones(5000, device=at) * rank
        assert fabric.all_gather(large, group=mine).sum() == 5000
        assert fabric.all_gather(large[: rank + 1], group=mine, uneven="cat").tolist() == [0.0, 1.0, 1.0]
        assert (fabric.broadcast(large, src=1, group=mine) == 1).all()
        assert fabric.all_to_all(torch.ones(2, device=at) * rank, group=mine).tolist() == [0.0, 1.0]
    assert fabric.all_gather_object("x" * 10_000 * (rank + 1), group=mine)[1] == "x" * 20_000
    on_host = dist.new_group([0, 1], backend="gloo")
    got = fabric.all_reduce(torch.ones(3, device=device), group=on_host, reduce_op="sum")
    assert got.tolist() == [2.0] * 3
    assert got.device == device
    fabric.barrier()


@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy])
def test_groups_of_users_have_backends_of_their_own(ranks, strategy):
    ranks.run(groups, strategy, world_size=2)


def nan(place, size):
    fabric = fabric_of("ddp")
    values = torch.zeros(size, device=fabric.device)
    if fabric.global_rank == place:
        values[-1] = NAN
    found = []
    for op in ("min", "max"):
        with HostSyncs() as waits:
            got = fabric.all_reduce(values.clone(), reduce_op=op)
            part = fabric.reduce_scatter(torch.cat([values, values]), reduce_op=op)
        found.append((got[:-1].abs().sum().item(), got[-1].item(), part[-1].item(), dict(waits.kinds)))
    tree = {
        "host": torch.full((size,), NAN if fabric.global_rank == place else 0.0),
        "device": values.clone(),
    }
    both = fabric.all_reduce(tree, reduce_op="max")
    return found, both["host"].isnan().all().item(), both["device"].isnan().sum().item()


@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("place", [0, 1])
def test_nan_stays_in_a_minimum_and_a_maximum(ranks, place, size):
    for found, host, device in ranks.run(nan, place, size, world_size=2):
        for others, last, part, waits in found:
            assert others == 0
            assert math.isnan(last)
            assert math.isnan(part)
            assert waits == {}
        assert host
        assert device == 1


def largest(strategy, place):
    fabric = fabric_of(strategy())
    model = fabric.setup_module(net(2))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 512, device=fabric.device)).sum())
    if fabric.global_rank == place:
        grad = next(p.grad for p in model.parameters() if p.grad is not None)
        (grad.to_local() if hasattr(grad, "to_local") else grad).view(-1)[0] = NAN
    return fabric.clip_gradients(
        model, optimizer, max_norm=1.0, norm_type=math.inf, error_if_nonfinite=False
    ).item()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("strategy", [FSDPStrategy, PipelineStrategy])
def test_the_largest_gradient_may_be_nan(ranks, strategy, place):
    assert all([math.isnan(norm) for norm in ranks.run(largest, strategy, place, world_size=2)])


def verbs():
    fabric = fabric_of("ddp")
    warnings.filterwarnings("ignore", message="fabric.log: this Fabric has no logger")
    device, rank = fabric.device, fabric.global_rank
    tensors = {"a": torch.ones(4, device=device), "b": [torch.ones(3, device=device, dtype=torch.int64)]}
    calls = {
        "all_reduce": lambda: fabric.all_reduce(tensors, reduce_op="sum"),
        "all_gather": lambda: fabric.all_gather(tensors),
        "reduce_scatter": lambda: fabric.reduce_scatter(torch.ones(4, device=device), reduce_op="sum"),
        "all_to_all": lambda: fabric.all_to_all(torch.ones(4, device=device)),
        "scatter": lambda: fabric.scatter(torch.ones(4, device=device)),
        "gather": lambda: fabric.gather(tensors),
        "broadcast": lambda: fabric.broadcast(tensors),
        "uneven": lambda: fabric.all_gather(torch.ones(rank + 1, device=device), uneven="cat"),
        "agree": lambda: fabric.agree({"epoch": 3}),
        "object": lambda: fabric.all_gather_object({"epoch": 3}),
        "any": lambda: fabric.any(rank == 0),
        "log": lambda: fabric.log_dict({"loss": 1.0}),
        "host": lambda: fabric.all_reduce(torch.ones(5000)),
        "numbers": lambda: fabric.all_reduce({"a": 1.0, "b": [2.5, 1j]}),
        "gathered": lambda: fabric.all_gather([rank, True]),
    }
    for call in calls.values():
        call()
    found = {}
    for name, call in calls.items():
        with HostSyncs() as waits:
            call()
        found[name] = {f"{kind} @ {place}": count for (kind, place), count in waits.places.items()}
    return {name: waits for name, waits in found.items() if waits}


def test_no_verb_lets_the_host_wait_for_tensors_of_a_device(ranks):
    assert ranks.run(verbs, world_size=2) == [{}, {}]


def alone():
    """The backend of the device named by itself: what is on the host has gloo beside it."""
    fabric = fabric_of(DDPStrategy(process_group_backend="simnccl"))
    with HostSyncs() as waits:
        fabric.all_reduce(torch.ones(5000))
        fabric.all_gather_object("x" * 20_000)
    return dict(waits.kinds), fabric.strategy.transport.sendable


def test_the_backend_named_alone(ranks):
    assert ranks.run(alone, world_size=2) == [({}, ("cpu", "sim"))] * 2
