"""Bytes that a rank holds, by layout: live tensors of real steps against closed formulas, fp32 with Adam."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.strategies import FSDPStrategy

WIDTH, DEPTH = 64, 8
"""Equal layers, which divide by 4."""
SIZE = DEPTH * (WIDTH * WIDTH + WIDTH)
STRATEGIES = {
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "zero2": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={nn.Linear}),
    "zero3": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}),
}
AFTER_STEP = {
    "ddp": lambda n: 16,
    "zero1": lambda n: 8 + 8 / n,
    "zero2": lambda n: 16 / n,
    "zero3": lambda n: 16 / n,
}
AFTER_FORWARD = {  # gradients are dropped; DDP's buckets are not
    "ddp": lambda n: 16,
    "zero1": lambda n: 8 + 8 / n,
    "zero2": lambda n: 4 + 12 / n,
    "zero3": lambda n: 12 / n,
}


def held() -> float:
    """Bytes per parameter of all memory that tensors have that came to be since `gc.freeze`. A collective.

    The least of a few looks: a thread of gloo lets go of a message some time after the rank has it.
    """
    return min([look() for _ in range(20)]) / SIZE


def look() -> int:
    dist.barrier()
    gc.collect()
    live = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    plain = [t for t in live if t.layout is torch.strided and not t.is_meta and not hasattr(t, "device_mesh")]
    return sum({s.data_ptr(): s.nbytes() for s in [t.untyped_storage() for t in plain]}.values())


def train(fabric: Fabric, width: int, empty: bool, watch: Callable[[], float]) -> list[float]:
    """What `watch` says after setup, after the second step's forward, and after that step."""
    with fabric.init_module(empty_init=empty):
        model = nn.Sequential(
            *[layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.ReLU())]
        )
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    seen = [watch()]
    x = torch.ones(1, width)
    for number in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if number:
            seen.append(watch())
        fabric.backward(loss)
        optimizer.step()
    return [*seen, watch()]


def bytes_per_parameter(strategy: str, empty: bool) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=STRATEGIES[strategy]())
    fabric.launch()
    train(fabric, 4, empty, lambda: 0.0)
    gc.collect()  # the optimizer goes: zero1 counts what a rank steps in others
    gc.freeze()  # what a process holds whatever the model is not looked at: modules, buffers of the guard
    try:
        return train(fabric, WIDTH, empty, held)
    finally:
        gc.unfreeze()


def assert_near(found: float, due: float) -> None:
    assert abs(found / due - 1) <= 0.1, (found, due)


CASES = [(name, world, True) for name in STRATEGIES for world in (2, 4)] + [
    ("zero2", 4, False),
    ("zero3", 4, False),
]


@pytest.mark.parametrize(("strategy", "world_size", "empty"), CASES)
def test_a_rank_holds_what_the_formula_says(ranks, strategy, world_size, empty):
    for after_setup, after_forward, after_step in ranks.run(
        bytes_per_parameter, strategy, empty, world_size=world_size
    ):
        assert_near(after_setup, 4 if strategy in ("ddp", "zero1") else 4 / world_size)
        assert_near(after_forward, AFTER_FORWARD[strategy](world_size))
        assert_near(after_step, AFTER_STEP[strategy](world_size))
