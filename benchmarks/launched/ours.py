"""Two ranks of this package to their first barrier: `ours.py [start method] [launches]`."""

import sys

from fabric import Fabric
from fabric.strategies import DDPStrategy


def work(fabric: Fabric) -> None:
    assert fabric.world_size == 2
    fabric.barrier()


if __name__ == "__main__":
    method, launches = (sys.argv[1:] + ["popen", "1"][len(sys.argv) - 1 :])[:2]
    for _ in range(int(launches)):
        Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(start_method=method)).launch(work)
