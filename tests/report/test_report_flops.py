"""Floating-point operations of a recorded run, its FLOP/s and MFU."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.cli import main
from fabric.core.errors import UsageError
from fabric.report.flops import FlopCounter
from fabric.report.format import pack_event, pack_header, pack_step, read
from fabric.utilities import measure_flops

RANK = "rank-{:05d}.bin"
ROWS, WIDTH = 6, 16
STEP_FLOPS = (
    2 * ROWS * WIDTH * WIDTH * 2 * 3 - 2 * ROWS * WIDTH * WIDTH
)  # two layers; the input needs no gradient


@pytest.fixture(autouse=True)
def counting(monkeypatch):
    monkeypatch.setenv("FABRIC_REPORT_FLOPS", "1")
    yield
    gc.collect()  # reports listen to backwards while they exist, which other tests count


def events(directory, rank=0, kind="flops"):
    return [
        part
        for part in read(Path(directory) / RANK.format(rank))
        if isinstance(part, dict) and part["kind"] == kind
    ]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def train(strategy: str, report, steps: int = 5, accumulate: int = 1, wrap=lambda model: model) -> list:
    world = dist.get_world_size() if dist.is_initialized() else 1
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, report=report)
    fabric.launch()
    try:
        model = wrap(net())
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(accumulate):
                x = torch.randn(
                    ROWS,
                    WIDTH,
                    generator=torch.Generator().manual_seed(100 * step + 10 * part + fabric.global_rank),
                )
                loss = model(x).pow(2).mean()
                fabric.backward(loss / accumulate)
            optimizer.step()
            losses.append(loss.item())
    finally:
        if report is not None:
            fabric.strategy.find_part("report").end()
    return losses


def compared(strategy: str, directory, accumulate: int) -> None:
    plain, recorded = (train(strategy, given, accumulate=accumulate) for given in (None, directory))
    assert plain == recorded, "the count changes no number"
    (event,) = events(directory, dist.get_rank())
    assert (event["flops"], event["step"]) == (accumulate * STEP_FLOPS, 3)


@pytest.mark.parametrize(
    ("strategy", "accumulate"), [("ddp", 1), ("ddp", 2), ("zero1", 1), ("zero2", 1), ("fsdp", 1)]
)
def test_a_step_is_counted_once_on_each_rank(ranks, tmp_path, strategy, accumulate):
    ranks.run(compared, strategy, tmp_path, accumulate, world_size=2)


def test_the_count_is_that_of_torch(tmp_path):
    train("auto", tmp_path)
    model, x = net(), torch.randn(ROWS, WIDTH)
    assert (
        events(tmp_path)[0]["flops"]
        == measure_flops(model, lambda: model(x), lambda out: out.sum())
        == STEP_FLOPS
    )


def test_a_compiled_model_is_compiled_once_and_counted(tmp_path):
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    plain = train("auto", None, wrap=lambda model: torch.compile(model, backend=backend))
    before = len(compiles)
    torch.compiler.reset()
    recorded = train("auto", tmp_path, wrap=lambda model: torch.compile(model, backend=backend))
    assert plain == recorded
    assert len(compiles) == 2 * before
    assert events(tmp_path)[0]["flops"] == STEP_FLOPS


def test_the_parts_of_a_dtensor_are_counted(ranks):
    ranks.run(sharded_product, world_size=2)


def sharded_product() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    weight, counter = distribute_tensor(torch.ones(8, 8), mesh, [Shard(1)]), FlopCounter()
    weight.requires_grad_()
    out = counter.run(torch.matmul, distribute_tensor(torch.ones(4, 8), mesh, [Replicate()]), weight)
    assert counter.flops == 2 * 4 * 8 * 4, "half of the columns"
    counter.run(out.sum().backward)
    assert counter.flops >= 2 * 2 * 4 * 8 * 4


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        out = self.layer(x)
        return torch.cond(out.sum() > 0, torch.sin, torch.cos, (out,))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.layer(x[None])[0]


def test_a_step_that_torch_cannot_count_has_no_rate(tmp_path):
    assert len(train("auto", tmp_path, wrap=lambda model: Recurrent())) == 5
    assert events(tmp_path) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # in what torch.cond traces
@pytest.mark.parametrize("counted", ["1", ""])
def test_operators_of_higher_order_are_not_counted(tmp_path, monkeypatch, counted):
    monkeypatch.setenv("FABRIC_REPORT_FLOPS", counted)
    torch.compiler.reset()
    if not counted:
        assert len(train("auto", tmp_path, wrap=lambda model: Branches())) == 5
        return
    with pytest.raises(UsageError, match=r"torch runs cond in another way .* Unset FABRIC_REPORT_FLOPS"):
        train("auto", tmp_path, wrap=lambda model: Branches())


def test_a_model_within_another_is_counted_once(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=1, report=tmp_path)
    fabric.launch()
    inner, outer = fabric.setup_module(nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.Linear(WIDTH, WIDTH))
    outer.forward = lambda x: inner(outer[0](x))
    model, optimizer = fabric.setup(outer, torch.optim.SGD(outer.parameters(), lr=0.1))
    for _ in range(4):
        fabric.backward(model(torch.ones(ROWS, WIDTH)).sum())
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(ROWS, WIDTH))
    fabric.strategy.find_part("report").end()
    assert events(tmp_path)[0]["flops"] == STEP_FLOPS


def test_an_operation_that_torch_cannot_count_ends_no_run(tmp_path, monkeypatch):
    from torch.utils import flop_counter

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.addmm, lambda *_, **__: 1 / 0)
    assert len(train("auto", tmp_path)) == 5
    assert events(tmp_path) == []


def test_a_run_that_multiplies_no_matrices_has_no_rate(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=1, report=tmp_path)
    fabric.launch()
    model = nn.LayerNorm(4)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    fabric.strategy.find_part("report").end()
    assert events(tmp_path) == []


def write_run(directory, peaks) -> None:
    """A run of two ranks of 1e12 operations a step; steps take 1 s and 2 s."""
    for rank, peak in enumerate(peaks):
        start = {"rank": rank, "world_size": 2, "hostname": "a", "script": "train.py"}
        start |= {} if peak is None else {"peak_flops": peak}
        parts = [pack_header(), pack_event("start", 1.0, 0, **start)]
        parts += [pack_step(step, float(step), [0.0] * 7, 1.0 + rank, 1) for step in range(1, 5)]
        parts += [pack_event("flops", 3.0, 3, flops=1e12), pack_event("end", 9.0, 4)]
        (directory / RANK.format(rank)).write_bytes(b"".join(parts))


@pytest.mark.parametrize(
    ("peaks", "mfu"), [((4e12, 4e12), 0.1875), ((4e12, 2e12), 0.25), ((4e12, None), None)]
)
def test_mfu_is_the_mean_over_ranks(tmp_path, capsys, peaks, mfu):
    write_run(tmp_path, peaks)
    assert main(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flops_per_second"] == 0.75e12
    assert found.get("mfu") == mfu
    assert "flops" not in [event["kind"] for event in found["events"]]
    assert main(["report", str(tmp_path), "--text"]) == 0
    text = capsys.readouterr().out
    assert "0.75 TFLOP/s per rank" in text
    assert (f"MFU {100 * (mfu or 0):.1f} %" in text) == (mfu is not None)


def test_the_peak_of_a_known_device_is_recorded(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("fabric.report.part.peak_flops", lambda device, dtype: asked.append(dtype) or 5)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed", report=tmp_path)
    fabric.launch()
    fabric.strategy.find_part("report").end()
    assert (asked, events(tmp_path, kind="start")[0]["peak_flops"]) == ([torch.bfloat16], 5)
