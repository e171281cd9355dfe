"""What the frame before each verb costs, by FABRIC_GUARD; 2 and 4 ranks, against torch.distributed.

What it costs in large worlds prints `at_scale.py --control`.
"""

from __future__ import annotations

import os
import sys
import warnings
from statistics import median
from typing import TYPE_CHECKING, Any

from harness import interleave, ranks, ratios, report, show, table

if TYPE_CHECKING:
    from collections.abc import Callable

MODES = ("full", "light", "off")
WORLDS = (2, 4)


def main() -> None:
    rows = []
    for world in WORLDS:
        for mode in MODES:
            found = ranks([__file__, "rank"], world, OMP_NUM_THREADS="1", FABRIC_GUARD=mode)
            for what, (us, more, ratio) in found.items():
                rows.append([str(world), mode, what, f"{us:.0f}", f"{more:+.0f}", f"{ratio:.2f}"])
    head = ["ranks", "FABRIC_GUARD", "call", "us", "added us", "ratio to by hand"]
    show([table("The guard, by mode", head, rows, "Medians over rounds; by hand is timed in the same run.")])


def measure() -> None:
    """Report {call: (us, added us, ratio)} of this mode; all ranks call this."""
    import torch
    import torch.distributed as dist

    from fabric import Fabric

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    scalar, one = torch.ones(()), torch.ones(())
    large, raw = torch.zeros(2**18), torch.zeros(2**18)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "all_reduce of a scalar": (
            lambda: dist.all_reduce(scalar),
            lambda: fabric.all_reduce(one, reduce_op="sum"),
        ),
        "all_reduce of 1 MiB": (
            lambda: dist.all_reduce(raw),
            lambda: fabric.all_reduce(large, reduce_op="sum"),
        ),
        "barrier": (dist.barrier, fabric.barrier),
    }
    found = {}
    for what, (by_hand, ours) in pairs.items():
        samples = interleave({"by hand": by_hand, "ours": ours}, 60, 5, before=dist.barrier)
        more = median([b - a for a, b in zip(samples["by hand"], samples["ours"], strict=True)])
        us = median(samples["ours"]) * 1e6
        found[what] = (us, more * 1e6, ratios(samples, "by hand")["ours"])
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        report(found)


if __name__ == "__main__":
    if os.environ.get("RANK") and sys.argv[1:] == ["rank"]:
        measure()
    else:
        main()
