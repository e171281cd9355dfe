"""What the replica check costs: steps with it and without it, 1,024 of each; digests; verbs. 2 ranks."""

from __future__ import annotations

import sys
import time
import warnings
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from harness import interleave, ranks, ratios, report, show, table

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 1024


def main() -> None:
    found = ranks([__file__, "rank"], 2, OMP_NUM_THREADS="1")
    steps = [[what, *cells] for what, cells in found["steps"].items()]
    verbs = [[what, f"{us:.0f}", f"{ratio:.3f}"] for what, (us, ratio) in found["verbs"].items()]
    head = ["step", "us without", "added us", "of it: counting (quartiles)", "added %", "a check, ms"]
    note = (
        "Added to a step: its counting, from differences of interleaved blocks, and 11 checks by 1,024 steps."
    )
    show(
        [
            table("Steps with the replica check", head, steps, note),
            table("Verbs with one optimizer set up", ["verb", "us with", "ratio to without"], verbs, ""),
            digest(),
        ]
    )


def digest() -> dict[str, Any]:
    import torch

    from fabric.replicas.digest import digest_of

    torch.set_num_threads(1)
    values = torch.randn(100_000_000)
    samples = interleave({"read": values.sum, "digest": lambda: digest_of([values])}, 15)
    row = [f"{median(samples[name]) * 1e3:.1f}" for name in ("read", "digest")]
    row.append(f"{ratios(samples, 'read')['digest']:.2f}")
    head = ["ms to read (torch.sum)", "ms of the digest", "ratio"]
    return table("Digest of 1e8 float32 on one core", head, [row], "")


def loop(fabric: Any, module: Any, width: int, rows: int) -> Callable[[], None]:
    import torch

    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1e-6))
    x = torch.ones(rows, width)

    def step() -> None:
        optimizer.zero_grad()
        fabric.backward(model(x).sum())
        optimizer.step()

    return step


def measure() -> None:
    """Report the cost of steps and verbs; all ranks call this."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from fabric import Fabric

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fabrics = {}
    for name, every in (("without", False), ("with", 10**9)):  # checks of values are timed apart
        fabrics[name] = Fabric(accelerator="cpu", devices=2, strategy="ddp", replica_check=every)
        fabrics[name].launch()
    found: dict[str, Any] = {"steps": {}, "verbs": {}}
    kinds = {
        "Linear(8, 8)": (lambda: nn.Linear(8, 8), 8, 4, 400, 10),
        "1e7 parameters": (
            lambda: nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(10)]),
            1000,
            16,
            60,
            1,
        ),
    }
    for what, (make, width, rows, rounds, inner) in kinds.items():
        cases = {name: loop(fabric, make(), width, rows) for name, fabric in fabrics.items()}
        samples = interleave(cases, rounds, inner, before=dist.barrier)
        base = median(samples["without"]) * 1e6
        pairs = zip(samples["without"], samples["with"], strict=True)
        low, counting, high = (1e6 * each for each in quantiles([b - a for a, b in pairs], n=4))
        checks = []
        for _ in range(11):
            dist.barrier()
            before = time.perf_counter()
            fabrics["with"].check_replicas()
            checks.append(time.perf_counter() - before)
        one = median(checks) * 1e6
        added = counting + 11 * one / STEPS
        counted = f"{counting:+.1f} ({low:+.0f} to {high:+.0f})"
        cells = [f"{base:.0f}", f"{added:+.1f}", counted, f"{100 * added / base:+.2f}"]
        found["steps"][what] = [*cells, f"{one / 1e3:.2f}"]
    scalar = torch.ones(())
    verbs = {
        "all_reduce of a scalar": lambda fabric: fabric.all_reduce(scalar, reduce_op="max"),
        "barrier": lambda fabric: fabric.barrier(),
    }
    for what, call in verbs.items():
        cases = {name: (lambda fabric=fabric, call=call: call(fabric)) for name, fabric in fabrics.items()}
        samples = interleave(cases, 200, 5, before=dist.barrier)
        found["verbs"][what] = (median(samples["with"]) * 1e6, ratios(samples, "without")["with"])
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        report(found)


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["rank"] else main()
