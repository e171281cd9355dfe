"""A run that goes on from its last save. Prints a JSON line per rank and step.

--kill-at: rank 1 kills itself after this step, once. --asks: every step asks should_stop().
--stop-at: in this step all ranks wait until they are asked to stop, then save and requeue the job, once.
"""

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.plugins.environments import SLURMEnvironment


def say(fabric, **what):
    line = {"rank": fabric.global_rank, "life": life(), **what}
    os.write(1, (json.dumps(line) + "\n").encode())  # one write: lines of several ranks do not mix


def life():
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or 0)


def stop(fabric, state, path):
    asked = 1
    while not fabric.should_stop():
        asked += 1
    fabric.save(path, state)
    say(fabric, stopped=state["step"], asked=asked)
    fabric.barrier()  # all lines are out: SLURM ends the job at once
    SLURMEnvironment().requeue()


def train(fabric, arguments):
    fabric.seed_everything(0, verbose=False)
    inputs = torch.randn(96, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    fabric.seed_everything(0, verbose=False, per_rank=True)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": fabric.rng_state()}
    state |= {"epoch": 0, "step": 0}
    path, killed = arguments.directory / "last.pt", arguments.directory / "killed"
    if path.exists():
        fabric.load(path, state)
    say(fabric, begins=state["step"])
    for epoch in range(state["epoch"], 4):
        state["epoch"] = epoch
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), target)
            fabric.backward(loss)
            optimizer.step()
            state["step"] += 1
            say(fabric, step=state["step"], loss=loss.item())
            if state["step"] % 4 == 0:
                fabric.save(path, state)
            if state["step"] == arguments.kill_at and fabric.global_rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if arguments.asks and fabric.should_stop():
                return
            if state["step"] == arguments.stop_at and life() == 0:
                stop(fabric, state, path)
                return
    weights = repr([parameter.tolist() for parameter in model.parameters()])
    say(fabric, weights=hashlib.sha256(weights.encode()).hexdigest())  # short: srun may mix long lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--asks", action="store_true")
    parser.add_argument("--stop-at", type=int)
    fabric = Fabric(accelerator="cpu")
    fabric.launch()
    train(fabric, parser.parse_args())
