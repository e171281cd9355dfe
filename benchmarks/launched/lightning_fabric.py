"""Ranks (BENCH_RANKS, 2) of Lightning Fabric to their first barrier: `lightning_fabric.py [strategy]`."""

import os
import sys

from lightning.fabric import Fabric

RANKS = int(os.environ.get("BENCH_RANKS", "2"))


def work(fabric: Fabric) -> None:
    assert fabric.world_size == RANKS
    fabric.barrier()


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=sys.argv[1] if len(sys.argv) > 1 else "ddp")
    fabric.launch(work)
