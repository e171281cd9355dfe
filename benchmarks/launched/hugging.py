"""Ranks (BENCH_RANKS, 2) of Accelerate to their first barrier, under `accelerate launch` or torchrun."""

import os

from accelerate import Accelerator

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == int(os.environ.get("BENCH_RANKS", "2")), accelerator.num_processes
    accelerator.wait_for_everyone()
    accelerator.end_training()
