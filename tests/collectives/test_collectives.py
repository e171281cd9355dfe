"""Collectives on 2 and 3 ranks against plain references, and how many messages they cost."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from collective_cases import (
    COMPLEX,
    FLAT,
    FLOATS,
    INTEGERS,
    alike,
    bits,
    counted,
    everywhere_alike,
    launched,
    random_tree,
    reduced,
)

from fabric.collectives import frames
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.tree import flatten

# all_reduce


def reduce_random_trees(op, dtypes, seeds):
    fabric = launched()
    for seed in seeds:
        data = random_tree(seed, fabric.global_rank, dtypes)
        everyone = [flatten(random_tree(seed, rank, dtypes))[0] for rank in range(fabric.world_size)]
        expected = [reduced(list(leaves), op) for leaves in zip(*everyone, strict=True)]
        before, spec = flatten(data)
        copies = [leaf.clone() for leaf in before]

        result = fabric.all_reduce(data, reduce_op=op, inplace=False)
        for leaf, copy in zip(before, copies, strict=True):
            assert bits(leaf) == bits(copy), "inplace=False leaves the input"
        leaves, result_spec = flatten(result)
        assert result_spec == spec
        for leaf, target in zip(leaves, expected, strict=True):
            assert leaf.dtype == target.dtype
            assert leaf.shape == target.shape
            tolerance = {"rtol": 1e-2, "atol": 0} if op == "mean" and leaf.dtype is torch.bfloat16 else {}
            torch.testing.assert_close(
                leaf.float() if leaf.dtype in INTEGERS else leaf,
                target.float() if leaf.dtype in INTEGERS else target,
                **tolerance,
            )
        everywhere_alike(result)

        again = fabric.all_reduce(data, reduce_op=op)
        for leaf, old, new in zip(flatten(again)[0], before, leaves, strict=True):
            assert leaf is old, "in place, the same objects come back"
            assert bits(leaf) == bits(new)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_all_reduce_of_random_trees(ranks, op, world_size):
    numbers = COMPLEX if op in ("sum", "mean") else []
    dtypes = [*FLOATS, *numbers] if op == "mean" else [*FLOATS, *INTEGERS, *numbers, torch.bool]
    ranks.run(reduce_random_trees, op, dtypes, range(25), world_size=world_size)


def reduce_rounding_numbers():
    fabric = launched()
    torch.manual_seed(fabric.global_rank)
    data = {n: torch.randn(n) for n in (1, 7, 1000, 300_000)}
    half = [torch.randn(100, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    everywhere_alike(fabric.all_reduce(data))
    everywhere_alike(fabric.all_reduce(half, reduce_op="sum"))


@pytest.mark.parametrize("world_size", [2, 3])
def test_rounding_is_the_same_on_every_rank(ranks, world_size):
    ranks.run(reduce_rounding_numbers, world_size=world_size)


def reduce_numbers():
    fabric = launched()
    rank = fabric.global_rank
    data = {"float": rank + 0.5, "complex": 1j * rank, "tensor": torch.tensor(float(rank))}
    result = fabric.all_reduce(data)
    assert data["float"] == rank + 0.5, "numbers are not written to"
    summed = fabric.all_reduce({"int": rank + 1, "bool": rank == 0}, reduce_op="sum")
    array = torch.full((2,), float(rank)).numpy()
    averaged = fabric.all_reduce(array, inplace=False)
    assert (array == rank).all(), "an array is no tensor: it keeps its values"
    return result, summed, averaged


def test_numbers_come_back_as_tensors(ranks):
    for result, summed, averaged in ranks.run(reduce_numbers, world_size=2):
        alike(
            result, {"float": torch.tensor(1.0), "complex": torch.tensor(0.5j), "tensor": torch.tensor(0.5)}
        )
        alike(summed, {"int": torch.tensor(3), "bool": torch.tensor(True)})
        alike(averaged, torch.full((2,), 0.5))


def count_small_tensors():
    fabric = launched()
    rank = fabric.global_rank
    data = {i: torch.full((i % 3 + 1,), float(rank)) for i in range(100)}
    mixed = [torch.tensor(float(rank), dtype=dtype) for dtype in (torch.float32, torch.float64) * 50]
    counts = []
    for call in (
        lambda: fabric.all_reduce(data),
        lambda: fabric.all_reduce(mixed),
        lambda: fabric.all_gather(data),
        lambda: fabric.all_gather(mixed),
        lambda: fabric.all_reduce(1.0),
        lambda: fabric.broadcast({"small": [1, 2, "text"]}),
        lambda: fabric.broadcast(data),
        lambda: fabric.all_reduce([]),
        lambda: fabric.all_gather(torch.empty(0)),
    ):
        with counted() as calls:
            call()
        counts.append(dict(calls))
    return counts


def test_small_data_are_one_message_and_no_barrier(ranks):
    # The frame of each rank, in which the data ride: one message whatever the verb and the dtypes.
    expected = [{"frame": 1}] * 9
    assert ranks.run(count_small_tensors, world_size=2) == [expected, expected]


def reduce_large_and_small():
    fabric = launched()
    rank = fabric.global_rank
    large = torch.full((frames.PACK_LIMIT // 4 + 1,), float(rank))
    strided = torch.full((2, frames.PACK_LIMIT // 4), float(rank)).t()
    data = [torch.tensor(float(rank)), large, torch.full((3,), float(rank)), strided]
    with counted() as calls:
        result = fabric.all_reduce(data)
        gathered = fabric.all_gather(data)
    assert result[1] is large
    # A frame for each call; two large ones alone, the small ones together.
    assert calls == {"frame": 2, "all_reduce": 3, FLAT: 3}
    for leaf in result:
        assert (leaf == 0.5).all()
    assert gathered[3].shape == (2, *strided.shape)


def test_large_leaves_travel_alone(ranks):
    ranks.run(reduce_large_and_small, world_size=2)


def reduce_awkward_tensors():
    fabric = launched()
    rank = fabric.global_rank
    leaf = torch.full((2,), float(rank), requires_grad=True)
    assert fabric.all_reduce(leaf) is leaf
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert leaf.tolist() == [0.5, 0.5]

    loss = (leaf * 2).sum()
    copy = fabric.all_reduce(loss, inplace=False)
    assert not copy.requires_grad
    loss.backward()

    with torch.inference_mode():
        evaluated = torch.full((2,), float(rank)), torch.tensor(float(rank))
    assert fabric.all_reduce(evaluated)[0].tolist() == [0.5, 0.5]

    conjugate = torch.tensor([complex(rank, 1)]).conj()
    assert fabric.all_reduce(conjugate, reduce_op="sum").tolist() == [1 - 2j]
    assert fabric.all_gather(torch.tensor([complex(rank, 1)]).conj()).tolist() == [[-1j], [1 - 1j]]
    negative = torch.tensor([complex(rank, 1)]).conj().imag
    assert negative.is_neg()
    assert fabric.all_reduce(negative, reduce_op="sum").tolist() == [-2.0]

    near_the_limit = torch.full((2,), 60000.0, dtype=torch.float16)
    assert fabric.all_reduce(near_the_limit).tolist() == [60000.0, 60000.0], "the sum alone would be inf"
    channels = torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last) + rank
    assert torch.equal(fabric.all_reduce(channels), torch.arange(16.0).view(1, 2, 2, 4) + 0.5)
    expanded = torch.tensor(float(rank)).expand(3)
    assert fabric.all_reduce(expanded, inplace=False).tolist() == [0.5] * 3


def test_tensors_that_are_not_plain_memory(ranks):
    ranks.run(reduce_awkward_tensors, world_size=2)


REFUSED = [
    (lambda: torch.tensor([1, 2]), "mean", ArgumentTypeError, "mean.*int64 would round.*reduce_op='sum'"),
    (lambda: {"a": torch.ones(1), "b": [3]}, "mean", ArgumentTypeError, "int64 would round"),
    (lambda: torch.tensor(True), "mean", ArgumentTypeError, "bool would round"),
    (lambda: torch.ones(2), "avrage", ConfigurationError, "'avrage' is not a reduction"),
    (lambda: torch.ones(2), 7, ArgumentTypeError, "is a int"),
    (lambda: {1, 2}, "sum", ArgumentTypeError, "a leaf is set"),
    (
        lambda: torch.ones(2, dtype=torch.complex64),
        "max",
        ArgumentTypeError,
        r"all_reduce\(max\).*view_as_real",
    ),
    (lambda: torch.ones(2).to(torch.float8_e4m3fn), "sum", ArgumentTypeError, r"float8.*\.float\(\)"),
    (lambda: torch.ones(2).to(torch.uint64), "sum", ArgumentTypeError, "uint64 is not defined"),
    (lambda: torch.ones(1).expand(3), "sum", ArgumentTypeError, "share memory.*inplace=False"),
    (lambda: torch.eye(2).to_sparse(), "sum", ArgumentTypeError, "to_dense"),
]


def refuse(case):
    make, op, kind, message = REFUSED[case]
    fabric = launched()
    first = torch.ones(1)
    with counted() as calls, pytest.raises(kind, match=message):
        fabric.all_reduce([first, make()], reduce_op=op)
    assert calls == {"frame": 1}, "only the frame in which the ranks refuse"
    assert first.item() == 1
    return fabric.all_reduce(1.0, reduce_op="sum").item()


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refused_on_all_ranks_and_usable_afterwards(ranks, case):
    assert ranks.run(refuse, case, world_size=2) == [2.0, 2.0]


def reduce_with_torchs_ops():
    fabric = launched()
    value = fabric.global_rank + 1.0
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, "SUM", "Mean", "avg", None)
    return [fabric.all_reduce(value, reduce_op=op).item() for op in ops]


def test_torchs_own_operations(ranks):
    assert ranks.run(reduce_with_torchs_ops, world_size=2)[1] == [3.0, 1.5, 2.0, 3.0, 1.5, 1.5, 3.0]


def decide():
    fabric = launched()
    first = fabric.global_rank == 0
    return [
        fabric.strategy.reduce_boolean_decision(decision, all=everyone)
        for everyone in (True, False)
        for decision in (True, False, first)
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_boolean_decision(ranks, world_size):
    expected = [True, False, False, True, False, True]
    assert ranks.run(decide, world_size=world_size) == [expected] * world_size


# barrier


def barrier_counts():
    fabric = launched()
    with counted() as calls:
        fabric.barrier("named")
        fabric.barrier()
    return dict(calls)


def test_barrier_is_one_message(ranks):
    assert ranks.run(barrier_counts, world_size=2) == [{"frame": 2}] * 2


# NaN


def extremes_with_nan(dtype, size, guard):
    os.environ["FABRIC_GUARD"] = guard
    try:
        fabric = launched()
        rank, world = fabric.global_rank, fabric.world_size
        found = []
        for op in ("min", "max"):
            for holder in (*range(world), None):  # which rank holds the NaN
                data = torch.linspace(-3, 3, world * size).to(dtype) * (-1) ** rank
                if rank == holder:
                    data[1] = float("nan")
                found.append(fabric.all_reduce(data, reduce_op=op, inplace=False).float())
                found.append(fabric.reduce_scatter(data, op).float())
        return found
    finally:
        del os.environ["FABRIC_GUARD"]


@pytest.mark.parametrize("guard", ["full", "light"])
@pytest.mark.parametrize("size", [4, 5000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_not_lost_in_a_minimum(ranks, dtype, size, guard):
    """gloo's own depends on which rank holds it."""
    world = 2
    results = ranks.run(extremes_with_nan, dtype, size, guard, world_size=world)
    expected = []
    for op in (torch.amin, torch.amax):
        for holder in (0, 1, None):
            base = torch.linspace(-3, 3, world * size).to(dtype)
            rows = torch.stack([base * (-1) ** rank for rank in range(world)]).float()
            if holder is not None:
                rows[holder, 1] = float("nan")
            expected.append(op(rows, 0))
    for rank, found in enumerate(results):
        for i, whole in enumerate(expected):
            torch.testing.assert_close(found[2 * i], whole, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(
                found[2 * i + 1], whole.chunk(world)[rank], rtol=0, atol=0, equal_nan=True
            )
