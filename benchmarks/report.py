"""What the run report costs: CPU time of the loop's thread per step with and without it, and bytes per step.

CPU time, since the report only computes and writes: it holds on a busy machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

from harness import ranks, report, show, table

ROUNDS, STEPS, HOOK_STEPS = 16, 250, 10_000
LIMIT = 100.0
"""Microseconds: 1 % of a step of 10 ms."""


def main() -> None:
    rows = []
    for world in (1, 2):
        found = ranks([__file__, "rank"], world, OMP_NUM_THREADS="1")
        for what, (base, more, size) in found.items():
            share = f"{100 * more / 10_000:.2f} %"
            rows.append([str(world), what, f"{base:.0f}", f"{more:+.1f}", share, f"{size:.1f}"])
    head = ["ranks", "what", "us without", "added us", "of a step of 10 ms", "bytes a step"]
    note = (
        f"CPU time of the loop's thread. The loop: DDP of one layer, medians of {ROUNDS} rounds of {STEPS} "
        "steps, with and without a report in turn. The hooks alone: a forward, backward, step, batch, verb, "
        f"call check and wait of nothing, {HOOK_STEPS:,} steps. Limits: {LIMIT:.0f} us and 60 bytes."
    )
    show([table("The run report", head, rows, note)])


def loop(fabric: Any, steps: int) -> float:
    """Return the CPU microseconds per step of a loop of this Fabric."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Linear(8, 8)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), replica_check=False)
    data = TensorDataset(torch.ones(2 * (steps + 10) * fabric.world_size, 8))
    begin = 0.0
    for number, (x,) in enumerate(fabric.setup_dataloaders(DataLoader(data, batch_size=2))):
        if number == 10:
            begin = time.thread_time()
        optimizer.zero_grad()
        fabric.backward(model(x).sum())
        optimizer.step()
    return 1e6 * (time.thread_time() - begin) / steps


def measure() -> None:
    """Report {what: (us without, us added, bytes per step)}; all ranks call this."""
    import torch
    import torch.distributed as dist

    from fabric import Fabric

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    plain, recorded = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for times, given in ((plain, None), (recorded, folder)):
                fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp", report=given)
                fabric.launch()
                times.append(loop(fabric, STEPS))
                fabric.strategy.teardown()
        size = Path(folder, f"rank-{rank:05d}.bin").stat().st_size / (ROUNDS * (STEPS + 10))
        more = median([b - a for a, b in zip(plain, recorded, strict=True)])
        found = {"a loop": (median(plain), more, size), "the hooks alone": hooks(folder)}
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        report(found)


def hooks(folder: str) -> tuple[float, float, float]:
    """Return (us of a step of empty calls, us that the recorder adds, bytes per step)."""
    import torch

    from fabric.report import calls
    from fabric.report.file import RankFile
    from fabric.report.part import Report
    from fabric.report.recorder import StepRecorder

    class Optimizer:
        def step(self) -> None: ...

        optimizer = property(lambda self: self)

    part, path = Report(Path(folder), ""), Path(folder, f"hooks-{os.getpid()}.bin")
    part.recorder = recorder = StepRecorder(RankFile(path, ""), 0, {}, torch.device("cpu"))
    optimizer, nothing = Optimizer(), (lambda: None)
    recorder.set_step_optimizer(optimizer)
    stepped = next(wrap for _, name, wrap in calls.replacements() if name == "step")(Optimizer.step)
    kinds = (calls.BACKWARD, calls.VERBS, calls.COMMUNICATION, calls.COMMUNICATION)
    timed = [calls.TimedForward(nothing), *[calls.timed(kind, None, nothing) for kind in kinds]]
    seconds = []
    for all_calls, step in (([nothing] * 5, Optimizer.step), (timed, stepped)):
        calls.timed_process.part = part if all_calls is timed else None
        loader = type("Loader", (), {"_epoch": 1, "batch_size": 1})()
        batches = iter(range(HOOK_STEPS))
        begin = time.thread_time()
        for _ in recorder.batches(lambda _, b=batches: b, loader) if all_calls is timed else batches:
            for call in all_calls:
                call()
            step(optimizer)
        seconds.append(1e6 * (time.thread_time() - begin) / HOOK_STEPS)
    calls.timed_process.part = None
    recorder.end(None)
    return seconds[0], seconds[1] - seconds[0], path.stat().st_size / HOOK_STEPS


if __name__ == "__main__":
    if os.environ.get("RANK") and sys.argv[1:] == ["rank"]:
        measure()
    else:
        main()
