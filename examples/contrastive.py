"""Contrastive learning on handwritten digits (InfoNCE, as in SimCLR): negatives from all processes.

Each image is seen in two views, and a view has to find its partner among the partners of the whole batch: the
more there are to choose from, the more there is to learn. Each process encodes its part of the batch, and the
embeddings of all are gathered with their gradients:

    - columns = {"a": a, "b": b}
    + columns = fabric.all_gather({"a": a, "b": b}, sync_grads=True)    # (world_size, batch, width) each

Why the gradient is that of one process with the whole batch: rank r computes L_r, the mean over ITS n rows
against ALL columns, and the loss of the whole batch is L = (L_0 + ... + L_(w-1)) / w. An embedding on rank s
takes part in L_s as a row and in every L_r as a column. Gradients through the gather are summed over ranks:
the backward on rank s gives d(L_0 + ... + L_(w-1)) = w dL with respect to its embeddings, and carries that to
the weights; the weights' gradient of L is the sum over ranks of those parts, divided by w: DDP's mean. No
factor is missing. A gather without gradients would drop the columns' part. Where ranks hold different numbers
of rows, n_r of N, gather with `uneven="cat"` and weigh L_r by w n_r / N.

    python examples/contrastive.py --devices 2
    python examples/contrastive.py --devices 2 --local      # negatives of the own process only

Loss and accuracy on 1 and on 2 processes agree to 1e-4 (relative); with `--local` they do not. Every report
shows, for the same embeddings, the loss against all negatives and that against the own ones: on 2 processes
the second asks an easier question.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from fabric import Fabric

TEMPERATURE = 0.1


class Encoder(nn.Module):
    """Images to embeddings; no batch norm, which would see each rank's part only.

    Smooth everywhere. At a kink (ReLU, max pooling) rounding decides which way a gradient goes, and over many
    steps of Adam two runs drift apart, whatever the number of processes.
    """

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.head = nn.Linear(32 * 4 * 4, 32)

    def forward(self, images):
        """Images (batch, 1, 8, 8) to embeddings (batch, 32) of length 1."""
        x = F.avg_pool2d(F.gelu(self.conv2(F.gelu(self.conv1(images)))), 2)
        return F.normalize(self.head(x.flatten(1)), dim=1)


def load_data():
    """Training data and every fifth image held out: (images (n, 1, 8, 8) from 0 to 1, labels (n,))."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(
        images[held_out], labels[held_out]
    )


def view(fabric, images):
    """The images, each turned, scaled, shifted and made noisy at random."""
    # All ranks draw for the global batch and take their part, as the loader does with images: an image is
    # changed alike whatever the number of processes.
    world, rank = fabric.world_size, fabric.global_rank
    count = len(images) * world
    angle = (2 * torch.rand(count) - 1) * math.radians(20)
    scale = 1 + 0.2 * (2 * torch.rand(count) - 1)
    shift = 0.25 * (2 * torch.rand(count, 2) - 1)  # in half widths of the image: one pixel
    noise = 0.1 * torch.randn(count, *images.shape[1:])

    cos, sin = scale * angle.cos(), scale * angle.sin()
    moves = torch.stack([cos, -sin, shift[:, 0], sin, cos, shift[:, 1]], 1).view(count, 2, 3)
    moves, noise = moves[rank::world].to(images), noise[rank::world].to(images)
    grid = F.affine_grid(moves, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False) + noise


def info_nce(rows, columns, first):
    """Mean over rows of how badly each finds its partner: row i belongs to column `first` + i.

    Args:
        rows: {"a": (n, width), "b": (n, width)}, the two views of the own images.
        columns: The same of all images, {"a": (N, width), "b": (N, width)}.
        first: The column of the first row.
    """
    partners = first + torch.arange(len(rows["a"]), device=rows["a"].device)
    a_to_b = F.cross_entropy(rows["a"] @ columns["b"].T / TEMPERATURE, partners)
    b_to_a = F.cross_entropy(rows["b"] @ columns["a"].T / TEMPERATURE, partners)
    return (a_to_b + b_to_a) / 2


def train(fabric, args):
    """The work of every rank. Returns the last epoch's loss and the accuracy, the same on all ranks."""
    fabric.seed_everything(args.seed, verbose=False)
    train_data, test_data = load_data()

    encoder = Encoder()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    encoder, optimizer = fabric.setup(encoder, optimizer)

    per_rank = args.batch_size // fabric.world_size
    loader = DataLoader(train_data, batch_size=per_rank, shuffle=True, drop_last=True)
    bank_loader, test_loader = DataLoader(train_data, batch_size=256), DataLoader(test_data, batch_size=256)
    loader, bank_loader, test_loader = fabric.setup_dataloaders(loader, bank_loader, test_loader)

    bar = tqdm(
        range(args.epochs), desc="epochs", leave=False, disable=None if fabric.is_global_zero else True
    )
    for epoch in bar:
        sums = {"all": torch.zeros((), device=fabric.device), "own": torch.zeros((), device=fabric.device)}
        for images, _ in loader:
            optimizer.zero_grad()
            # One forward for both views.
            a, b = encoder(torch.cat([view(fabric, images), view(fabric, images)])).chunk(2)
            rows = {"a": a, "b": b}
            gathered = fabric.all_gather(rows, sync_grads=True)
            columns = {name: table.flatten(0, 1) for name, table in gathered.items()}
            against_all = info_nce(rows, columns, first=fabric.global_rank * len(a))
            against_own = info_nce(rows, rows, first=0)
            fabric.backward(against_own if args.local else against_all)
            optimizer.step()

            sums["all"] += against_all.detach()
            sums["own"] += against_own.detach()
        losses = {name: value.item() / len(loader) for name, value in fabric.all_reduce(sums).items()}
        if (epoch + 1) % args.report_every == 0:
            fabric.print(
                f"epoch {epoch + 1}: loss {losses['all']:.4f} against {per_rank * fabric.world_size - 1} "
                f"negatives of all processes, {losses['own']:.4f} against {per_rank - 1} of the own"
            )

    accuracy = nearest_neighbour_accuracy(fabric, encoder, bank_loader, test_loader)
    fabric.print(
        f"contrastive: {fabric.world_size} process(es), trained against {'own' if args.local else 'all'} "
        f"negatives, loss {losses['all']:.6f}, nearest-neighbour accuracy {accuracy:.6f}"
    )
    return {"loss": losses["all"], "accuracy": accuracy}


@torch.no_grad()
def nearest_neighbour_accuracy(fabric, encoder, bank_loader, test_loader):
    """Share of held-out images whose nearest training image has their label."""
    encoder.eval()
    mine = [(encoder(images), labels) for images, labels in bank_loader]
    # Each training image is encoded once, on one rank. 1,437 do not divide by 2: the ranks' parts differ.
    part = {"z": torch.cat([z for z, _ in mine]), "labels": torch.cat([labels for _, labels in mine])}
    bank = fabric.all_gather(part, uneven="cat")

    right = total = 0
    for images, labels in test_loader:
        nearest = (encoder(images) @ bank["z"].T).argmax(1)
        right += (bank["labels"][nearest] == labels).sum().item()
        total += len(labels)
    sums = fabric.all_reduce({"right": right, "total": total}, reduce_op="sum")
    return int(sums["right"]) / int(sums["total"])


def main():
    """Read the command line, start the ranks."""
    parser = argparse.ArgumentParser(description="Contrastive learning with the negatives of all processes.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--local", action="store_true", help="negatives of the own process only")
    parser.add_argument("--report-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    fabric = Fabric(
        accelerator=args.accelerator, strategy=args.strategy, devices=args.devices, precision=args.precision
    )
    fabric.launch(train, args)


if __name__ == "__main__":
    main()
