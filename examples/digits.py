"""Handwritten digits: a raw PyTorch loop on one or many processes, with the same numbers.

What changed against the raw loop (-: raw PyTorch, +: with fabric):

    + fabric = Fabric(devices=2)
    + fabric.launch(train)
      ...
      model = Net()
      optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    + model, optimizer = fabric.setup(model, optimizer)
    - loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
    + loader = DataLoader(data, batch_size=64 // fabric.world_size, shuffle=True, drop_last=True)
    + loader = fabric.setup_dataloaders(loader)
      for epoch in range(epochs):
          for images, labels in loader:
    -         images, labels = images.to(device), labels.to(device)
              optimizer.zero_grad()
              loss = F.cross_entropy(model(images), labels)
    -         loss.backward()
    +         fabric.backward(loss)
              optimizer.step()

Run it as it is under any launcher:

    python examples/digits.py --devices 2
    python examples/digits.py --devices 2 --strategy ddp_spawn
    torchrun --nproc-per-node 2 examples/digits.py
    fabric run --devices 2 examples/digits.py

The 1,797 images of 8 x 8 pixels come with scikit-learn; nothing is downloaded.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from fabric import Fabric


class Net(nn.Module):
    """Two convolutions and a linear layer; no batch norm, which would see each rank's part only."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images):
        """Images (batch, 1, 8, 8) to logits (batch, 10)."""
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(x.flatten(1))


def load_data():
    """Training data and every fifth image held out: (images (n, 1, 8, 8) from 0 to 1, labels (n,))."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(
        images[held_out], labels[held_out]
    )


def train(fabric, args):
    """The work of every rank. Returns one dictionary per epoch, the same on all ranks."""
    fabric.seed_everything(args.seed, verbose=False)
    train_data, test_data = load_data()

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)

    # The global batch stays 64 however many processes share it. drop_last leaves out what does not fill one.
    per_rank = args.batch_size // fabric.world_size
    loader = DataLoader(train_data, batch_size=per_rank, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_data, batch_size=per_rank)
    loader, test_loader = fabric.setup_dataloaders(loader, test_loader)

    history = []
    for epoch in range(args.epochs):
        model.train()
        start, loss_sum, seen = time.perf_counter(), torch.zeros((), device=fabric.device), 0
        bar = tqdm(
            loader, desc=f"epoch {epoch}", leave=False, disable=None if fabric.is_global_zero else True
        )
        for images, labels in bar:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
            seen += len(labels)
        sums = fabric.all_reduce({"loss": loss_sum, "seen": seen}, reduce_op="sum")
        seconds = time.perf_counter() - start

        row = {"epoch": epoch, "loss": sums["loss"].item() / int(sums["seen"])}
        row["accuracy"] = evaluate(fabric, model, test_loader)
        row["samples_per_s"] = int(sums["seen"]) / seconds
        history.append(row)
        fabric.print(
            f"epoch {epoch}: loss {row['loss']:.4f}, held-out accuracy {row['accuracy']:.4f}, "
            f"{row['samples_per_s']:,.0f} samples/s"
        )

    last = history[-1]
    fabric.print(
        f"digits: {fabric.world_size} process(es), loss {last['loss']:.6f}, accuracy {last['accuracy']:.6f}"
    )
    if args.history and fabric.is_global_zero:
        Path(args.history).write_text(json.dumps(history))
    return history


@torch.no_grad()
def evaluate(fabric, model, loader):
    """Share of held-out images that are right. Each image is seen once, on one rank."""
    model.eval()
    right = total = 0
    for images, labels in loader:
        right += (model(images).argmax(1) == labels).sum().item()
        total += len(labels)
    sums = fabric.all_reduce({"right": right, "total": total}, reduce_op="sum")
    return int(sums["right"]) / int(sums["total"])


def main():
    """Read the command line, start the ranks."""
    parser = argparse.ArgumentParser(description="Handwritten digits on one or many processes.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--history", default=None, help="a JSON file for the numbers of each epoch")
    args = parser.parse_args()

    fabric = Fabric(
        accelerator=args.accelerator, strategy=args.strategy, devices=args.devices, precision=args.precision
    )
    fabric.launch(train, args)


if __name__ == "__main__":
    main()
