"""A DDP training step of 1e7 parameters on 2 ranks: all variants in one pair of processes, in turn."""

from __future__ import annotations

import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from harness import as_text, installed, interleave, ranks, ratios, report, show, summarise, timing_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Table

ROUNDS = 80
WIDTH, DEPTH = 1000, 10
"""Ten square layers: 1e7 parameters."""
BATCHES = (2, 16)
"""Samples per rank: few, so that gradients and their exchange are what is measured, and some."""


def main() -> None:
    import torch

    devices = ["cpu"]
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        devices.append("cuda")
    tables = []
    for device in devices:
        tables += ranks([__file__, device], OMP_NUM_THREADS="1")
    show(tables)


def measure(device: str) -> None:
    """Time every variant; all ranks call this."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    made = {name: make(where) for name, make in variants(device).items()}
    tables = [table for batch in BATCHES for table in compare(made, batch, where)]
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        report(tables)


def compare(made: dict[str, Any], batch: int, device: Any) -> list[Table]:
    """Wall and CPU time of every variant's step with `batch` samples; all ranks call this."""
    import torch
    import torch.distributed as dist

    x = torch.randn(batch, WIDTH, device=device)
    cases = {name: step_of(x, *loop) for name, loop in made.items()}
    samples = interleave(cases, ROUNDS, warmup=4, before=dist.barrier)
    busy = interleave(cases, ROUNDS // 2, before=dist.barrier, clock=time.process_time)
    what = f"DDP step, 1e7 parameters, 2 ranks, batch {batch}, {device.type}"
    steps = timing_table(f"{what}, target <= 0.95", samples, "raw DDP", 1e-3, "ms")
    work = timing_table(f"{what}: CPU time of rank zero", busy, "raw DDP", 1e-3, "ms")
    values = as_text(ratios(samples, "raw DDP"), "{:.2f}")
    limit = values["raw, bucket views"] + " (bucket views)"
    summarise(steps, f"{what}, vs raw DDP", values, limit, "<= 0.95")
    return [steps, work]


def variants(device: str) -> dict[str, Callable[[Any], tuple[Any, Any, Callable[[Any], None]]]]:
    """What makes each variant's model, optimizer and backward."""
    made: dict[str, Any] = {
        "raw DDP": raw({}),
        "raw DDP again": raw({}),
        "raw, bucket views": raw({"gradient_as_bucket_view": True}),
        "raw, bucket views + static graph": raw({"gradient_as_bucket_view": True, "static_graph": True}),
        "ours": ours(device, {}),
    }
    if installed("lightning"):
        made["Lightning Fabric"] = lightning(device)
    if installed("accelerate"):
        made["Accelerate"] = accelerate
    return made


def fresh(device: Any) -> tuple[Any, Any]:
    """The model, alike on all ranks, and its optimizer."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    model = torch.nn.Sequential(*layers).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def raw(settings: dict[str, Any]) -> Any:
    """torch's DistributedDataParallel as a user writes it."""

    def make(device: Any) -> Any:
        import torch

        model, optimizer = fresh(device)
        ids = None if device.type == "cpu" else [device.index]
        return (
            torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, **settings),
            optimizer,
            torch.Tensor.backward,
        )

    return make


def ours(kind: str, settings: dict[str, Any]) -> Any:
    """This package."""

    def make(device: Any) -> Any:
        from fabric import Fabric
        from fabric.strategies import DDPStrategy

        fabric = Fabric(accelerator=kind, devices=2, strategy=DDPStrategy(**settings) if settings else "ddp")
        fabric.launch()
        return *fabric.setup(*fresh(device)), fabric.backward

    return make


def lightning(kind: str) -> Any:
    """Lightning Fabric."""

    def make(device: Any) -> Any:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator=kind, devices=2, strategy="ddp")
        fabric.launch()
        return *fabric.setup(*fresh(device)), fabric.backward

    return make


def accelerate(device: Any) -> Any:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    if accelerator.num_processes != 2:
        raise RuntimeError(f"Accelerate sees {accelerator.num_processes} processes instead of 2")
    return *accelerator.prepare(*fresh(device)), accelerator.backward


def step_of(x: Any, model: Any, optimizer: Any, backward: Callable[[Any], None]) -> Callable[[], None]:
    """One whole training step, finished on the device."""
    import torch

    finish = torch.cuda.synchronize if x.device.type == "cuda" else None

    def step() -> None:
        optimizer.zero_grad()
        backward(model(x).square().mean())
        optimizer.step()
        if finish is not None:
            finish()

    return step


if __name__ == "__main__":
    if len(sys.argv) == 2:
        measure(sys.argv[1])
    else:
        main()
