"""`fabric.testing.communication`: each collective of a block once, by kind, bytes and line."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError
from fabric.strategies import ModelParallelStrategy
from fabric.testing import communication

WIDTH = 16


def step(strategy):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, replica_check=False)
    fabric.launch()
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    size = model.weight.nbytes
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):  # the first makes DDP's buckets anew
        with communication() as counted:
            optimizer.zero_grad()
            fabric.backward(model(torch.ones(2, WIDTH)).sum())
            optimizer.step()
    fabric.strategy.teardown()
    return size, counted.by_kind, counted.by_line


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [("ddp", {"all_reduce": 1}), ("zero2", {"all_gather": 1, "reduce_scatter": 1})],
)
def test_a_step_sends_what_its_layout_says(ranks, strategy, kinds, world):
    for size, by_kind, by_line in ranks.run(step, strategy, world_size=world):
        for kind, calls in kinds.items():
            count, sent = by_kind[kind]
            assert count == calls
            assert size <= sent <= size + 4 * WIDTH * world  # FSDP pads the last rank's rows
        assert set(by_kind) - set(kinds) <= {"broadcast"}
        assert all([line.rpartition(":")[0].endswith("test_communication.py") for line in by_line])


def tensor_parallel(styles):
    """A step of four layers whose outputs are joined by all-gathers, or of two pairs that need none."""
    if styles == "pairs":
        plan = [ColwiseParallel(), RowwiseParallel()] * 2
    else:
        plan = [ColwiseParallel(output_layouts=Replicate()) for _ in range(4)]
    parallelize = lambda model, mesh: parallelize_module(  # noqa: E731
        model, mesh["tensor_parallel"], {str(number): style for number, style in enumerate(plan)}
    )
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=1, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, replica_check=False)
    fabric.launch()
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    model = fabric.setup(model)
    with communication() as counted:
        fabric.backward(model(torch.ones(8, WIDTH)).sum())
    fabric.strategy.teardown()
    return counted.by_kind


@pytest.mark.parametrize(
    ("styles", "kinds"),
    [
        ("joined", {"all_gather": 4, "all_reduce": 3}),
        ("pairs", {"all_reduce": 3}),  # of two outputs, and of the gradient of one input
    ],
)
def test_collectives_of_tensor_parallel_layers(ranks, styles, kinds):
    size = 8 * WIDTH * 4
    for by_kind in ranks.run(tensor_parallel, styles, world_size=2):
        assert by_kind == {kind: (calls, calls * size) for kind, calls in kinds.items()}


def limits():
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    with communication() as counted:
        dist.all_reduce(torch.ones(256))
        dist.all_reduce(torch.ones(256))
        fabric.all_reduce(1.0)  # in a frame between hosts
    counted.assert_at_most(bytes=2048, calls=2)
    with pytest.raises(AssertionError) as failed:
        counted.assert_at_most(bytes=2047, calls=1)
    with pytest.raises(ArgumentTypeError, match=r"Write assert_at_most\(bytes=4096, calls=2\)"):
        counted.assert_at_most()
    fabric.strategy.teardown()
    return str(failed.value)


def test_more_than_the_budget_is_an_error_with_the_lines(ranks):
    for text in ranks.run(limits, world_size=2):
        assert text.startswith(
            "2048 bytes, at most 2047; 2 calls, at most 1:\n1 x all_reduce of 1024 bytes ("
        )
        assert "test_communication.py:" in text
