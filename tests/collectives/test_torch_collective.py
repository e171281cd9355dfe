"""`TorchCollective` without a Fabric: every operation on real ranks, and the life of its groups."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fabric.collectives.reduce import torch_op
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.plugins.collectives import TorchCollective
from fabric.testing import rank_info


def every_operation():
    c = TorchCollective()
    rank, world = c.rank, c.world_size
    mine = torch.tensor([rank + 1.0, rank + 2.0])
    total = torch.tensor([float(sum(range(1, world + 1))), float(sum(range(2, world + 2)))])

    assert c.rank_in_group == rank
    assert torch.equal(c.broadcast(mine.clone(), 1), torch.tensor([2.0, 3.0]))
    assert torch.equal(c.all_reduce(mine.clone()), total)
    assert torch.equal(c.all_reduce(mine.clone(), "mean"), total / world)
    assert torch.equal(c.all_reduce(mine.clone(), "avg"), total / world)
    assert torch.equal(c.all_reduce(mine.clone(), "MAX"), torch.tensor([world, world + 1.0]))
    assert torch.equal(
        c.all_reduce(torch.tensor([rank, 7]), "bor"), torch.tensor([1 if world == 2 else 3, 7])
    )

    reduced = c.reduce(mine.clone(), 1, "sum")
    averaged = c.reduce(mine.clone(), 0, "mean")
    if rank == 1:
        assert torch.equal(reduced, total)
    if rank == 0:
        assert torch.equal(averaged, total / world)

    rows = [torch.zeros(2) for _ in range(world)]
    assert c.all_gather(rows, mine) is rows
    assert [row[0].item() for row in rows] == [r + 1.0 for r in range(world)]
    flat = torch.zeros(2 * world)
    c.start_all_gather_flat(flat, mine).wait()
    assert torch.equal(flat, torch.cat(rows))
    rows = [torch.zeros(2) for _ in range(world)]
    c.gather(mine, rows, dst=1)
    assert [row[0].item() for row in rows] == (
        [r + 1.0 for r in range(world)] if rank == 1 else [0.0] * world
    )

    parts = [torch.tensor([10.0 * r]) for r in range(world)]
    assert c.scatter(torch.zeros(1), parts if rank == 1 else [], src=1).item() == 10.0 * rank
    assert c.reduce_scatter(torch.zeros(1), parts, "sum").item() == world * 10.0 * rank
    assert c.reduce_scatter(torch.zeros(1), parts, "mean").item() == 10.0 * rank
    out = [torch.zeros(1) for _ in range(world)]
    c.all_to_all(out, [torch.tensor([100.0 * rank + r]) for r in range(world)])
    assert [t.item() for t in out] == [100.0 * r + rank for r in range(world)]

    if rank == 0:
        c.send(torch.tensor([5.0]), 1, tag=3)
    elif rank == 1:
        assert c.recv(torch.zeros(1), 0, tag=3).item() == 5.0
    c.barrier()
    if rank == 0:
        c.send(torch.tensor([6.0]), 1)
    elif rank == 1:
        assert c.recv(torch.zeros(1)).item() == 6.0, "from any rank"

    assert c.all_gather_object([None] * world, {"rank": rank}) == [{"rank": r} for r in range(world)]
    assert c.broadcast_object_list([rank, "x"], 1) == [1, "x"]
    assert c.gather_object(rank, [None] * world, dst=1) == (
        list(range(world)) if rank == 1 else [None] * world
    )
    assert c.scatter_object_list([None], [f"for {r}" for r in range(world)], src=0) == [f"for {rank}"]
    c.monitored_barrier(timeout=timedelta(seconds=30))
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_operation(ranks, world_size):
    assert all(ranks.run(every_operation, world_size=world_size))


def bools():
    c = TorchCollective()
    results = {}
    for op in ("sum", "max", "product", "min"):
        value = c.all_reduce(torch.tensor([True, c.rank == 0, False]), op)
        results[op] = value.view(torch.uint8).tolist()
    return results


def test_bools_stay_zero_or_one(ranks):
    expected = {"sum": [1, 1, 0], "max": [1, 1, 0], "product": [1, 0, 0], "min": [1, 0, 0]}
    assert ranks.run(bools, world_size=2) == [expected, expected]


def nan_in_extremes():
    """Each element is NaN on another rank."""
    c, nan = TorchCollective(), float("nan")
    mine = torch.tensor([nan if c.rank == holder else 1.0 for holder in range(c.world_size)])
    found = {}
    for op in ("min", "max"):
        reduced = c.reduce(mine.clone(), 0, op)
        found[op] = [
            c.all_reduce(mine.clone(), op),
            c.reduce_scatter(torch.zeros(1), list(mine.split(1)), op),
            reduced if c.rank == 0 else torch.tensor(nan),
        ]
    return [all(t.isnan().all() for t in results) for results in found.values()]


def test_nan_is_the_extreme_whichever_rank_holds_it(ranks):
    assert ranks.run(nan_in_extremes, world_size=2) == [[True, True]] * 2


def started():
    c = TorchCollective()
    tensor = torch.tensor([1.0 + c.rank])
    work = c.start_all_reduce(tensor, "mean")
    assert work.wait() is tensor
    assert work.is_completed()
    return tensor.item()


def test_a_mean_that_was_started_is_there_after_the_wait(ranks):
    assert ranks.run(started, world_size=2) == [1.5, 1.5]


def mean_of_integers():
    c = TorchCollective()
    values = torch.tensor([1, 2])
    calls = (
        lambda: c.all_reduce(values, "mean"),
        lambda: c.reduce(values, 0, "avg"),
        lambda: c.reduce_scatter(values[:1], [values[:1]] * 2, "mean"),
    )
    for call in calls:
        with pytest.raises(ArgumentTypeError, match=r"mean of torch\.int64 would round"):
            call()
    return c.all_reduce(values, "sum").tolist()


def test_the_mean_of_integers_is_refused_before_anything_is_sent(ranks):
    assert ranks.run(mean_of_integers, world_size=2) == [[2, 4], [2, 4]]


def life_of_groups():
    c = TorchCollective()
    assert c.group is dist.group.WORLD
    assert c.setup() is c, "the group that stands is used"
    pair = TorchCollective().create_group(ranks=[0, 2])
    member = dist.get_rank() in (0, 2)
    if member:
        assert (pair.world_size, pair.rank, pair.rank_in_group) == (2, dist.get_rank(), dist.get_rank() // 2)
        assert pair.all_reduce(torch.tensor(dist.get_rank())).item() == 2
    with pytest.raises(UsageError, match=r"has a group already.*second TorchCollective"):
        pair.create_group(ranks=[0, 1])
    pair.teardown()
    c.teardown()
    assert dist.is_initialized(), "who did not make the default group leaves it"
    return True


def test_groups_beside_the_default_one(ranks):
    assert all(ranks.run(life_of_groups, world_size=3))


def make_the_default_group():
    info = rank_info()
    c = TorchCollective()
    assert TorchCollective.is_available()
    assert not TorchCollective.is_initialized()
    with pytest.raises(UsageError, match=r"no process group.*\.setup\(\)"):
        _ = c.group
    store = dist.FileStore(info.store, info.world_size)
    c.setup(backend="gloo", store=store, rank=info.rank, world_size=info.world_size)
    total = c.all_reduce(torch.tensor(1)).item()
    c.teardown()
    assert not dist.is_initialized()
    return total


def test_setup_makes_and_teardown_unmakes_the_default_group(ranks):
    assert ranks.run(make_the_default_group, world_size=2, group=False) == [2, 2]


def meet_at_an_address():
    c = TorchCollective().setup(
        main_address="127.0.0.1",
        main_port="0",
        backend="gloo",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
    )
    try:
        return c.world_size
    finally:
        c.teardown()


def test_setup_with_an_address_leaves_the_environment_alone(ranks):
    # The pool fails a call that changes environment variables.
    assert ranks.run(meet_at_an_address, world_size=1, group=False) == [1]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("mean", "AVG"),
        ("avg", "AVG"),
        ("Sum", "SUM"),
        ("MIN", "MIN"),
        ("max", "MAX"),
        ("product", "PRODUCT"),
        ("bxor", "BXOR"),
    ],
)
def test_names_of_reductions(name, op):
    assert torch_op(name) == getattr(dist.ReduceOp, op)
    assert torch_op(getattr(dist.ReduceOp, op)) == getattr(dist.ReduceOp, op)


def test_what_is_no_reduction():
    with pytest.raises(ConfigurationError, match=r"'maxx' is not a reduction\. Did you mean 'max'"):
        torch_op("maxx")
    with pytest.raises(ArgumentTypeError, match="reduce_op=None is a NoneType"):
        torch_op(None)
