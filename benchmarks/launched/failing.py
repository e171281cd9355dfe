"""Ranks of which one dies, or is late: `failing.py ENGINE WHAT [strategy]`; prints when (monotonic clock)."""

import os
import signal
import sys
import time

ENGINE, WHAT, *STRATEGY = sys.argv[1:]


def work(rank, barrier):
    barrier()
    if rank == 1:
        print(f"AT {time.monotonic()}", flush=True)
        if WHAT == "late":
            time.sleep(60)
        if WHAT.startswith("raise"):
            raise ValueError("boom")
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "late" or WHAT.endswith("collective"):
        barrier()
    time.sleep(20)


def by_fabric(fabric):
    work(fabric.global_rank, fabric.barrier)


if __name__ == "__main__":
    if ENGINE == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        work(dist.get_rank(), dist.barrier)
    elif ENGINE == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        work(accelerator.process_index, accelerator.wait_for_everyone)
    else:
        if ENGINE == "lightning":
            from lightning.fabric import Fabric
        else:
            from fabric import Fabric
        made = Fabric(accelerator="cpu", devices=2, strategy=(STRATEGY or ["ddp"])[0])
        made.launch(by_fabric)
