"""A subject for test_pipeline_faults: `staged.py START STAGE HOW WHEN`: a stage of a pipeline ends badly."""

import os
import signal
import sys

import torch
from torch import nn

from fabric import Fabric
from fabric.strategies import PipelineStrategy


class Block(nn.Module):
    """A layer that ends this process when it is told to."""

    def __init__(self):
        super().__init__()
        self.layer, self.end = nn.Linear(4, 4), ""

    def forward(self, x):
        if self.end.startswith("forward"):
            end(self.end.split()[1])
        x = self.layer(x)
        if self.end.startswith("backward"):
            x.register_hook(lambda _: end(self.end.split()[1]))
        return x


def end(how):
    if how == "raise":
        raise ValueError("boom")
    os.kill(os.getpid(), signal.SIGKILL)


def train(fabric, stage, how, when):
    torch.manual_seed(0)  # the same batches on all ranks
    model = nn.Sequential(*[Block() for _ in range(3)])
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(100):
        if step == 3 and fabric.global_rank == stage:
            model.module[stage].end = f"{when} {how}"
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        if when.endswith("-step"):
            model.pipeline_step(x, x, nn.functional.mse_loss)
        else:
            fabric.backward(model(x).pow(2).mean())
        optimizer.step()


if __name__ == "__main__":
    start, stage, how, when = sys.argv[1:]
    strategy = PipelineStrategy([1, 1, 1], 4, start_method=start)
    fabric = Fabric(accelerator="cpu", devices=3, strategy=strategy)
    fabric.launch(train, int(stage), how, when)
