"""Ranks (BENCH_RANKS, 2) of this package to their first barrier: `ours.py [start method] [launches]`."""

import os
import sys

from fabric import Fabric
from fabric.strategies import DDPStrategy

RANKS = int(os.environ.get("BENCH_RANKS", "2"))


def work(fabric: Fabric) -> None:
    assert fabric.world_size == RANKS
    fabric.barrier()


if __name__ == "__main__":
    method, launches = (sys.argv[1:] + ["popen", "1"][len(sys.argv) - 1 :])[:2]
    for _ in range(int(launches)):
        Fabric(accelerator="cpu", devices=RANKS, strategy=DDPStrategy(start_method=method)).launch(work)
