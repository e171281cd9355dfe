"""A user's script: the same file under every way to start it. Prints one JSON line per rank."""

import argparse
import json
import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.strategies import DDPStrategy


def train(fabric: Fabric, epochs: int) -> float:
    fabric.seed_everything(7, verbose=False)
    x = torch.randn(48, 4)
    y = x.sum(1, keepdim=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    loader = DataLoader(TensorDataset(x, y), batch_size=8 // fabric.world_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(epochs):
        for batch, target in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), target)
            fabric.backward(loss)
            optimizer.step()
    final = fabric.all_reduce(loss.detach()).item()
    facts = {
        "rank": fabric.global_rank,
        "world_size": fabric.world_size,
        "loss": round(final, 5),
        "threads": torch.get_num_threads(),
        "weights": [round(w, 5) for w in model.weight.detach().flatten().tolist()],
    }
    # One write: lines of several ranks must not mix.
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
    return final


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--start-method", default=None)
    parser.add_argument("--style", choices=["function", "script"], default="function")
    arguments = parser.parse_args()
    strategy = arguments.strategy
    if arguments.start_method:
        strategy = DDPStrategy(start_method=arguments.start_method)
    before = dict(os.environ)
    fabric = Fabric(accelerator="cpu", devices=arguments.devices, strategy=strategy)
    if arguments.style == "function":
        fabric.launch(train, 2)
        fabric.launch(train, 0) if fabric.world_size < 0 else None
    else:
        fabric.launch()
        fabric.launch()  # again: nothing happens
        train(fabric, 2)
    added = {key for key in os.environ if before.get(key) != os.environ[key]}
    known = {"FABRIC_GLOBAL_SEED", "FABRIC_JOINED", "FABRIC_SEED_WORKERS", "TORCHINDUCTOR_CACHE_DIR"}
    if added & {"FABRIC_LAUNCHED"}:  # the first process of a script has become a rank
        known |= {"FABRIC_LAUNCHED", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT"}
        known |= {"RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    if added - known:
        raise SystemExit(f"environment variables left behind: {added}")
