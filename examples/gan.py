"""A small GAN on handwritten digits: two models, two optimizers, two backward passes in one step.

Each model is set up by its own call with its own optimizer. The discriminator's step runs two forwards and
two backwards before one `step()`; gradients are synchronised in both, since `fabric.backward` arms the sync.
A test compares its numbers with the same loop in plain torch, on 1, 2 and 4 processes.

    python examples/gan.py --devices 2
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from fabric import Fabric

NOISE = 16


def make_generator():
    """Noise (batch, 16) to images (batch, 64) from 0 to 1."""
    return nn.Sequential(
        nn.Linear(NOISE, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 64),
        nn.Sigmoid(),
    )


def make_discriminator():
    """Images (batch, 64) to one logit each, high for real ones."""
    return nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )


def judged(logits, real):
    """How far the discriminator's logits are from "all real" or "all made up"."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def train(fabric, args):
    """The work of every rank. Returns the last epoch's losses and the distance, the same on all ranks."""
    fabric.seed_everything(args.seed, verbose=False)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16

    generator, discriminator = make_generator(), make_discriminator()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    generator, optimizer_g = fabric.setup(generator, optimizer_g)
    discriminator, optimizer_d = fabric.setup(discriminator, optimizer_d)

    order = torch.Generator().manual_seed(args.seed)  # of the shuffle: the noise has torch's own generator
    per_rank = args.batch_size // fabric.world_size
    data = TensorDataset(images)
    loader = DataLoader(data, batch_size=per_rank, shuffle=True, drop_last=True, generator=order)
    loader = fabric.setup_dataloaders(loader)

    def noise(count):
        # All ranks draw the noise of the global batch and take their part, as the loader does with images:
        # the same pairs are made whatever the number of processes.
        joined = torch.randn(count * fabric.world_size, NOISE)
        return joined[fabric.global_rank :: fabric.world_size].to(fabric.device)

    bar = tqdm(
        range(args.epochs), desc="epochs", leave=False, disable=None if fabric.is_global_zero else True
    )
    for epoch in bar:
        sums = {"d": torch.zeros((), device=fabric.device), "g": torch.zeros((), device=fabric.device)}
        for (real,) in loader:
            fake = generator(noise(len(real)))

            # The discriminator: gradients of both losses add up.
            optimizer_d.zero_grad()
            loss_real = judged(discriminator(real), real=True)
            fabric.backward(loss_real)
            loss_fake = judged(discriminator(fake.detach()), real=False)
            fabric.backward(loss_fake)
            optimizer_d.step()

            # The generator, through the discriminator; what that leaves in the discriminator's gradients is
            # zeroed before its next step.
            optimizer_g.zero_grad()
            loss_g = judged(discriminator(fake), real=True)
            fabric.backward(loss_g)
            optimizer_g.step()

            sums["d"] += (loss_real + loss_fake).detach()
            sums["g"] += loss_g.detach()
        losses = {name: value.item() / len(loader) for name, value in fabric.all_reduce(sums).items()}
        if (epoch + 1) % args.report_every == 0:
            fabric.print(f"epoch {epoch + 1}: discriminator {losses['d']:.4f}, generator {losses['g']:.4f}")

    distance = mean_distance(fabric, generator, images)
    fabric.print(
        f"gan: {fabric.world_size} process(es), discriminator loss {losses['d']:.5f}, "
        f"generator loss {losses['g']:.5f}, distance of the mean images {distance:.5f}"
    )
    return {**losses, "distance": distance}


@torch.no_grad()
def mean_distance(fabric, generator, images):
    """Root mean square difference between the mean real and the mean made-up image: 0 is perfect."""
    fixed = torch.Generator().manual_seed(1)
    made = generator(torch.randn(512, NOISE, generator=fixed).to(fabric.device))
    return (made.mean(0).cpu() - images.mean(0)).square().mean().sqrt().item()


def main():
    """Read the command line, start the ranks."""
    parser = argparse.ArgumentParser(description="A small GAN on handwritten digits.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    # Two models that train against each other make differences of rounding grow: in single precision 1 and 2
    # processes print other losses after 10 epochs.
    parser.add_argument("--precision", default="64-true")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--report-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    fabric = Fabric(
        accelerator=args.accelerator, strategy=args.strategy, devices=args.devices, precision=args.precision
    )
    fabric.launch(train, args)


if __name__ == "__main__":
    main()
