"""A loop that test_launcher.py starts; its losses go to a file that is named first."""

import sys

import torch
from torch import nn

from fabric import Fabric


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="deepspeed_stage_2")
    fabric.launch()
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x[fabric.global_rank * 3 :][:3]).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach()))
    if fabric.is_global_zero:
        torch.save(torch.stack(losses), sys.argv[-1])


if __name__ == "__main__":
    main()
