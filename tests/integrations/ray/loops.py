"""What the actors run; imported by name there."""

import os
import time
from pathlib import Path

import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step, rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, x):
    return model(x).pow(2).mean()


def train(fabric, steps, folder=None):
    """(weights, world size, number of nodes)."""
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(steps):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, batch(step, fabric.global_rank)))
        optimizer.step()
    weights = fabric.strategy.get_module_state_dict(model)
    places = fabric.all_gather_object((fabric.global_rank, fabric.local_rank, fabric.node_rank))
    return {name: value.clone() for name, value in weights.items()}, places


def plain(steps, ranks):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(step, rank) for rank in range(ranks)])).backward()
        optimizer.step()
    return dict(model.state_dict())


def fails(fabric, folder):
    note(fabric, folder)
    if fabric.global_rank == 1:
        raise ValueError("no such thing")
    fabric.barrier()


def dies(fabric, folder):
    note(fabric, folder)
    if fabric.global_rank == 1:
        os._exit(7)
    fabric.barrier()


def waits(fabric, folder):
    note(fabric, folder)
    time.sleep(300)


def note(fabric, folder):
    """Let the test know of this process, once all are there."""
    fabric.barrier()
    Path(folder, f"pid-{fabric.global_rank}").write_text(str(os.getpid()))
    fabric.barrier()


def survives(fabric, folder):
    """Ten steps, saved after each; on two ranks the fifth waits for the node to be lost."""
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer}
    first, world = fabric.load_latest(Path(folder, "saved"), state) or 0, fabric.world_size
    for step in range(first, 10):
        if step == 5 and world == 2:
            note(fabric, folder)
            time.sleep(300)
        optimizer.zero_grad()
        x = torch.cat([batch(step, rank) for rank in range(2)])  # the same global batch on any number
        fabric.backward(loss_of(model, x.chunk(world)[fabric.global_rank]))
        optimizer.step()
        fabric.save_latest(Path(folder, "saved"), state, step=step + 1)
    return first, world, dict(fabric.strategy.get_module_state_dict(model))
