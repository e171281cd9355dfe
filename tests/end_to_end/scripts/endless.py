"""Trains until somebody ends it. Prints a JSON line per rank once training goes on."""

import argparse
import json
import os
from datetime import timedelta

import torch

from fabric import Fabric
from fabric.strategies import DDPStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--call", choices=["backward", "all_reduce"], default="backward")
parser.add_argument("--timeout", type=float, default=8)
parser.add_argument("--startup-timeout", type=float, default=120)
arguments = parser.parse_args()

strategy = DDPStrategy(
    timeout=timedelta(seconds=arguments.timeout),
    startup_timeout=timedelta(seconds=arguments.startup_timeout),
)
fabric = Fabric(accelerator="cpu", strategy=strategy)
fabric.launch()
if arguments.call == "backward":
    net = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
step = 0
while True:
    if arguments.call == "backward":
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    else:
        fabric.all_reduce(torch.ones(3))
    step += 1
    if step == 5:
        facts = {"rank": fabric.global_rank, "world_size": fabric.world_size, "pid": os.getpid()}
        os.write(1, (json.dumps(facts) + "\n").encode())
