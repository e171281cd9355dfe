"""A run that saves every two steps, alternately beside the loop, and goes on from its newest checkpoint.

Prints a JSON line per rank when it begins, and one per step with the loss of the global batch of 12 samples.
--kills N: in each of the first N lives of the job a timer kills one rank: rank, step and time are drawn.
--ends-at STEP: all ranks are killed after this step, each by a timer. --double: all in double precision.
"""

import argparse
import json
import os
import random
import signal
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric

BATCH, SAMPLES, EPOCHS = 12, 180, 4
LIFE = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def say(fabric, **what):
    line = {"rank": fabric.global_rank, "life": LIFE, **what}
    os.write(1, (json.dumps(line) + "\n").encode())  # one write: lines of several ranks do not mix


def strike(fabric, arguments, begins):
    """The step after which this rank's timer runs, and its seconds."""
    draw = random.Random(f"{arguments.strategy} {LIFE}")
    victim, step, seconds = draw.randrange(fabric.world_size), draw.randint(1, 5), draw.uniform(0, 0.04)
    if victim == fabric.global_rank and arguments.kills > LIFE:
        return begins + step, seconds
    return arguments.ends_at, random.Random(f"{fabric.global_rank}").uniform(0, 0.04)


def train(arguments):
    if arguments.double:
        torch.set_default_dtype(torch.float64)
    fabric = Fabric(accelerator="cpu", strategy=arguments.strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    inputs = torch.randn(SAMPLES, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(arguments.dropout), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=scheduler)
    loader = DataLoader(data, batch_size=BATCH // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    fabric.seed_everything(0, verbose=False, per_rank=True)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "step": 0}
    state |= {"loader": loader, "rng": fabric.rng_state()}
    begins = fabric.load_latest(arguments.directory, state) or 0
    say(fabric, begins=begins, world_size=fabric.world_size)
    at, seconds = strike(fabric, arguments, begins)
    for epoch in range(state["epoch"], EPOCHS):
        state["epoch"] = epoch
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), target)
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            state["step"] += 1
            loss = fabric.all_reduce(loss.detach()).item()
            if fabric.is_global_zero:
                say(fabric, step=state["step"], loss=loss)
            if state["step"] == at:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            stops = fabric.should_stop()
            if stops or state["step"] % 2 == 0:
                fabric.save_latest(
                    arguments.directory, state, step=state["step"], wait=stops or state["step"] % 4 == 0
                )
            if stops:
                return
            if at is not None and at <= state["step"] < at + 3 and arguments.ends_at:
                threading.Event().wait(0.05)  # no rank is through before all have died


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--ends-at", type=int)
    train(parser.parse_args())
