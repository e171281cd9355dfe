"""One loop under every layout equals plain torch on the joined batch: losses, weights, norms, states."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from machine import ACCELERATOR
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fabric import Fabric
from fabric.plugins.precision import MixedPrecision
from fabric.strategies import FSDPStrategy, ModelParallelStrategy

STEPS, ROWS = 3, 4


class Block(nn.Module):
    """Uneven rows (7 and 3 on 2 or 4 ranks), a norm, a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, hidden)
        self.outer = nn.Linear(hidden, 6)
        self.gain = nn.Parameter(torch.ones(3, 1))

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(self.norm(x)))) * self.gain.mean()


class Net(nn.Module):
    """Embedding and head tied, two blocks, a frozen layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(2)])
        self.fixed = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.fixed.requires_grad_(False)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(torch.relu(self.fixed(h)) + h)


def net(layout: str) -> Net:
    torch.manual_seed(7)
    return Net(8 if layout.startswith("tp") else 7)  # tensor parallel layers of torch must divide


def data(world: int, count: int) -> torch.Tensor:
    """(count, world, ROWS, 3) tokens, the same on every rank; the target is the next token."""
    return torch.randint(0, 9, (count, world, ROWS, 3), generator=torch.Generator().manual_seed(13))


def loss_of(model, tokens):
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), (tokens.flatten() + 1) % 9)


def split_blocks(model, mesh, style="tp"):
    for block in model.blocks:
        if style == "sp":  # the residual stream is split along the tokens of a row
            plan = {
                "norm": SequenceParallel(),
                "inner": ColwiseParallel(input_layouts=Shard(1)),
                "outer": RowwiseParallel(output_layouts=Shard(1)),
            }
        else:
            plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
        parallelize_module(block, mesh["tensor_parallel"], plan)
    return model


def tensor_parallel(model, mesh):
    return split_blocks(model, mesh)


def tensor_and_sharded(model, mesh):
    split_blocks(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


LAYOUTS = {
    "tp": lambda: ModelParallelStrategy(tensor_parallel, 1, "auto"),
    "tp-dp": lambda: ModelParallelStrategy(tensor_parallel, 2, "auto"),
    "tp-fsdp": lambda: ModelParallelStrategy(tensor_and_sharded, 2, 2),
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
    "zero2": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={Block}),
    "zero3": lambda: FSDPStrategy(auto_wrap_policy={Block}),
    "zero3-one-group": FSDPStrategy,
    "hsdp": lambda: FSDPStrategy(
        sharding_strategy="HYBRID_SHARD",
        device_mesh=(2, dist.get_world_size() // 2),
        auto_wrap_policy={Block},
    ),
    "no-shard": lambda: FSDPStrategy(sharding_strategy="NO_SHARD", auto_wrap_policy={Block}),
    "offload": lambda: FSDPStrategy(cpu_offload=True, auto_wrap_policy={Block}),
}
CLIPS = {
    "none": {},
    "norm": {"max_norm": 0.05},
    "inf": {"max_norm": 0.01, "norm_type": math.inf},
    "value": {"clip_val": 0.005},
}
TOLERANCE = {"32-true": 1e-5, "64-true": 1e-6, "bf16-mixed": 3e-2, "bf16-true": 6e-2, "16-mixed": 3e-3}


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(ACCELERATOR, init_scale=256.0)


def launched(layout: str, precision: str = "32-true") -> Fabric:
    # From the default scale of 65536 a rank's gradients overflow where those of the joined batch do not.
    plugin = MixedPrecision(precision, ACCELERATOR, scaler=scaler()) if precision == "16-mixed" else None
    fabric = Fabric(
        accelerator=ACCELERATOR,
        devices=dist.get_world_size(),
        strategy=LAYOUTS[layout](),
        precision=None if plugin else precision,
        plugins=plugin,
    )
    fabric.launch()
    return fabric


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def ready(fabric: Fabric, layout: str, when: str = "before"):
    model = net(layout)
    if when == "after" or layout == "offload":
        model = fabric.setup_module(model)
        return model, fabric.setup_optimizers(make_optimizer(model.parameters()))
    return fabric.setup(model, make_optimizer(model.parameters()))


def train(layout: str, precision: str, accumulate: int, clip: str, when: str = "before"):
    fabric = launched(layout, precision)
    model, optimizer = ready(fabric, layout, when)
    part = fabric.strategy.distributed_sampler_kwargs
    tokens = data(part["num_replicas"], STEPS * accumulate)[:, part["rank"]].to(ACCELERATOR)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            with fabric.no_backward_sync(model, enabled=micro < accumulate - 1):
                loss = loss_of(model, tokens[step * accumulate + micro]) / accumulate
                fabric.backward(loss)
            losses.append(fabric.all_reduce(loss.detach().clone()))
        if clip != "none":
            norms.append(fabric.clip_gradients(model, optimizer, **CLIPS[clip]))
        optimizer.step()
    weights = fabric.strategy.get_module_state_dict(model)
    norms = [norm.cpu() for norm in norms if norm is not None]
    return torch.stack(losses).cpu(), norms, {name: value.cpu() for name, value in weights.items()}


def train_plain(layout: str, world: int, precision: str, accumulate: int, clip: str):
    model = net(layout)
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision)
    model = model if dtype is None else model.to(dtype)
    half = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    optimizer = make_optimizer(model.parameters())
    scale = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=precision == "16-mixed")
    tokens = data(world, STEPS * accumulate).flatten(1, 2)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            with torch.autocast("cpu", half) if half else nullcontext():
                logits = model(tokens[step * accumulate + micro])
            targets = (tokens[step * accumulate + micro].flatten() + 1) % 9
            loss = nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets) / accumulate
            scale.scale(loss).backward()
            losses.append(loss.detach())
        scale.unscale_(optimizer)
        if "max_norm" in CLIPS[clip]:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), **CLIPS[clip]))
        elif clip == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.005)
        scale.step(optimizer)
        scale.update()
    return torch.stack(losses), norms, model.state_dict()


def assert_equal(got, expected, tolerance: float) -> None:
    losses, norms, weights = expected
    torch.testing.assert_close(got[0].float(), losses.float(), atol=tolerance, rtol=tolerance)
    assert len(got[1]) == len(norms)
    for norm, want in zip(got[1], norms, strict=True):
        torch.testing.assert_close(norm.float(), want.float(), atol=tolerance, rtol=10 * tolerance)
    assert list(got[2]) == list(weights)
    for name, want in weights.items():
        assert got[2][name].dtype == want.dtype, name
        torch.testing.assert_close(
            got[2][name].float(), want.float(), atol=tolerance, rtol=tolerance, msg=name
        )


def worlds(layout: str) -> tuple[int, ...]:
    return (4,) if layout in ("hsdp", "tp-dp", "tp-fsdp") else (2, 4)


def parts(layout: str, world: int) -> int:
    """How many parts of the data there are."""
    return {"tp": 1, "tp-dp": 2, "tp-fsdp": 2}.get(layout, world)


FEATURES = ((1, "none"), (3, "norm"), (1, "inf"), (3, "value"))
"""Micro-batches of a step and kind of clipping: each clip once, and none and one after several backwards."""


def is_run(layout: str, world: int, precision: str, accumulate: int, clip: str) -> bool:
    """In float32 on the smallest world each of `FEATURES`; elsewhere the one that has most in it."""
    if precision == "16-mixed" and layout in ("offload", "tp", "tp-dp", "tp-fsdp"):
        return False
    smallest = world == worlds(layout)[0]
    if precision == "32-true" and smallest:
        return (accumulate, clip) in FEATURES
    return accumulate == 3 and clip == "norm" and (smallest or precision == "32-true")


CASES = [
    (layout, world, precision, accumulate, clip)
    for layout in LAYOUTS
    for world in worlds(layout)
    for precision in TOLERANCE
    for accumulate in (1, 3)
    for clip in CLIPS
    if is_run(layout, world, precision, accumulate, clip)
]


DEVICE_CASES = [
    pytest.param(*case, marks=pytest.mark.device)
    if case[1] == worlds(case[0])[0] and case[2] != "64-true" and case[3:] in ((3, "norm"), (1, "inf"))
    else case
    for case in CASES
]


@pytest.mark.parametrize(("layout", "world_size", "precision", "accumulate", "clip"), DEVICE_CASES)
def test_training_equals_plain_torch(ranks, layout, world_size, precision, accumulate, clip):
    expected = train_plain(layout, parts(layout, world_size), precision, accumulate, clip)
    for got in ranks.run(train, layout, precision, accumulate, clip, world_size=world_size):
        assert_equal(got, expected, TOLERANCE[precision])
