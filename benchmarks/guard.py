"""What the frame before each verb costs, by FABRIC_GUARD; 2 and 4 ranks, against torch.distributed.

And what it costs the first rank of a large world.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from statistics import median
from typing import TYPE_CHECKING, Any

from harness import interleave, ranks, ratios, report, show, table

if TYPE_CHECKING:
    from collections.abc import Callable

MODES = ("full", "light", "off")
WORLDS = (2, 4)
KEY_BYTES, TURNS = 24, 20
FAR = (16, 64, 256, 1024)
"""Worlds of which the first rank is timed alone; one process plays the others."""


def main() -> None:
    rows = []
    for world in WORLDS:
        for mode in MODES:
            found = ranks([__file__, "rank"], world, OMP_NUM_THREADS="1", FABRIC_GUARD=mode)
            for what, (us, more, ratio) in found.items():
                rows.append([str(world), mode, what, f"{us:.0f}", f"{more:+.0f}", f"{ratio:.2f}"])
    head = ["ranks", "FABRIC_GUARD", "call", "us", "added us", "ratio to by hand"]
    show(
        [
            table("The guard, by mode", head, rows, "Medians over rounds; by hand is timed in the same run."),
            far(),
        ]
    )


def far() -> dict[str, Any]:
    """What a call costs the first rank of a large world, through which all frames go."""
    from fabric.guard.control_connections import ControlConnections, Listener, connect

    rows, key = [], bytes(32)
    for world in FAR:
        with Listener(world - 1) as listener:
            pid = os.fork()
            if not pid:
                stars = [
                    ControlConnections(connect(at, "localhost", listener.port, key), range(world), at)
                    for at in range(1, world)
                ]
                for _ in range(TURNS):
                    for star, turn in [(star, star.start(bytes(KEY_BYTES))) for star in stars]:
                        star.advance(turn, 60)
                os._exit(0)
            star = ControlConnections(listener.accept(key), range(world), 0)
        times = []
        for _ in range(TURNS):
            time.sleep(0.05)  # by then the others have sent
            before = time.thread_time()
            star.advance(star.start(bytes(KEY_BYTES)), 60)
            times.append(time.thread_time() - before)
        os.waitpid(pid, 0)
        rows.append([str(world), f"{median(times) * 1e3:.2f}"])
    note = (
        "Processor time, with nothing but keys in the frames; without the network's latency, there and back."
    )
    return table("A call in large worlds", ["ranks", "ms on the first one"], rows, note)


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
