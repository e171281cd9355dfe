"""A subject for test_faults: `faults.py LAUNCHER VICTIM HOW OTHERS`: a loop in which one rank ends badly."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.strategies import DDPStrategy

STRATEGIES = {
    "script": "ddp",
    "cli": "ddp",
    "spawn": "ddp_spawn",
    "fork": "ddp_fork",
    "forkserver": DDPStrategy(start_method="forkserver"),
}


def end(how):
    if how == "raise":
        raise ValueError("boom")
    if how == "exit":
        sys.exit(3)
    if how == "abort":
        os.abort()
    os.kill(os.getpid(), signal.SIGKILL)


def compute():
    while True:
        torch.randn(64, 64) @ torch.randn(64, 64)


def wait_in(state, fabric):
    if state == "compute":
        compute()
    if state == "collective":
        fabric.all_reduce(torch.ones(3))
    if state == "backward":
        ready.backward()
    if state == "native":  # all ranks wait for each other where no Python runs
        dist.recv(torch.zeros(1), src=1 - fabric.global_rank)
    if state == "loader":
        next(ready)
    if state == "stop":
        while not fabric.should_stop():
            time.sleep(0.01)
        os.write(1, b"stopped\n")
        return
    time.sleep(600)


class Backward:
    """A loss of a DDP model, whose backward waits for the other ranks."""

    def __init__(self, fabric):
        self.fabric, self.model = fabric, fabric.setup(torch.nn.Linear(4, 4))
        self.fabric.backward(self.model(torch.ones(2, 4)).sum())
        self.loss = self.model(torch.ones(2, 4)).sum()

    def backward(self):
        self.fabric.backward(self.loss)


def prepared(state, fabric):
    """What takes time, before the ranks say that they are ready."""
    if state == "backward":
        return Backward(fabric)
    if state == "loader":
        loader = iter(
            fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(64, 4)), 2, num_workers=1))
        )
        next(loader)
        return loader
    return None


def train(fabric, victim, how, others):
    global ready
    ready = prepared(others, fabric)
    if how != "leave at once":
        fabric.barrier()
    if others == "stop":
        fabric.should_stop()  # from now on SIGTERM is a request
    os.write(1, b"ready\n")
    if how != "leave at once":
        fabric.barrier()  # nobody is ended before it has said so
    if fabric.global_rank == victim and how.startswith("leave"):
        return
    if fabric.global_rank == victim:
        end(how)
    wait_in(others, fabric)


if __name__ == "__main__":
    launcher, victim, how, others = sys.argv[1:]
    if launcher == "fork":
        import torch._dynamo  # DDP does: once, instead of in each rank
    devices = 3 if launcher == "fork" and others != "native" else 2
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=STRATEGIES[launcher])
    if launcher in ("script", "cli"):
        fabric.launch()
        train(fabric, int(victim), how, others)
    else:
        fabric.launch(train, int(victim), how, others)
