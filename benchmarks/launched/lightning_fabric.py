"""Two ranks of Lightning Fabric to their first barrier: `lightning_fabric.py [strategy]`."""

import sys

from lightning.fabric import Fabric


def work(fabric: Fabric) -> None:
    assert fabric.world_size == 2
    fabric.barrier()


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1] if len(sys.argv) > 1 else "ddp")
    fabric.launch(work)
