"""A character-level transformer over long texts, of which each process works on a part: the loop is plain.

Nothing is downloaded. Processes that share a text hold their part of its activations; attention collects the
keys and values of all. Any number of processes prints the same losses:

    python examples/long_context.py --devices 1
    python examples/long_context.py --devices 2
    python examples/long_context.py --devices 2 --strategy fsdp
    python examples/long_context.py --devices 4 --share 2

The last line has two texts at a time, each shared by two processes.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.strategies import ContextParallel, DDPStrategy, FSDPStrategy
from fabric.utilities import sequence_positions

TEXT = "\n".join(topics[name] for name in sorted(topics))  # Python's own help
ALPHABET = {character: i for i, character in enumerate(sorted(set(TEXT)))}
STRATEGIES = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}


class Block(nn.Module):
    """Attention to the past, with rotary positions, then a perceptron."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        speeds = 1000 ** -torch.linspace(0, 1, width // heads // 2)
        self.register_buffer("speeds", speeds, persistent=False)

    def turned(self, x):
        """(batch, heads, time, size) with each pair of features turned by its position."""
        positions = sequence_positions(x.shape[2], x.device)  # in place of torch.arange(x.shape[2])
        angles = positions[:, None] * self.speeds
        left, right = x.chunk(2, -1)
        return torch.cat(
            [left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1
        )

    def forward(self, x):
        parts = self.project(self.norms[0](x)).chunk(3, -1)
        query, key, value = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        seen = F.scaled_dot_product_attention(self.turned(query), self.turned(key), value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


class Model(nn.Module):
    """Characters (batch, time) and the next ones, if known, to logits, or to the loss of each character."""

    def __init__(self, width=64, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, characters, targets=None):
        logits = self.head(self.blocks(self.embedding(characters)))
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.transpose(1, 2), targets, reduction="none"
        )  # of each part: (batch, time)


def train(fabric, args):
    """The work of every process. Prints the same losses on any number of processes."""
    fabric.seed_everything(0, verbose=False)  # all alike, as for one model on one device
    size = args.length + 1
    windows = torch.tensor([ALPHABET[character] for character in TEXT]).unfold(0, size, size)
    held_out, windows = windows[:4], windows[4 : 4 + args.steps * args.batch_size]

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)

    # Processes that share a text see the same batches; rows of them share the batches out.
    rows = args.batch_size // fabric.strategy.data_rank[1]
    loader = fabric.setup_dataloaders(DataLoader(windows, batch_size=rows))
    for step, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = model(batch[:, :-1], batch[:, 1:]).mean()  # the loss of each character comes back whole
        fabric.backward(loss)
        optimizer.step()
        if step % args.report_every == 0:
            fabric.print(f"step {step}: loss {fabric.all_reduce(loss.detach()).item():.4f}")

    model.eval()
    with torch.no_grad():
        held_out = held_out.to(fabric.device)
        loss = model(held_out[:, :-1], held_out[:, 1:]).mean().item()
    fabric.print(
        f"long_context: {fabric.world_size} process(es), held-out loss {loss:.6f}, {loss / math.log(2):.4f} "
        "bits per character"
    )


def main():
    """Read the command line, start the processes."""
    parser = argparse.ArgumentParser(description="A character-level transformer over long texts.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--strategy", default="ddp", choices=STRATEGIES)
    parser.add_argument("--share", type=int, default=None, help="processes that share a text; default: all")
    parser.add_argument("--length", type=int, default=512, help="characters of each text")
    parser.add_argument("--batch-size", type=int, default=2, help="texts per step, of all processes together")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--report-every", type=int, default=10)
    args = parser.parse_args()

    strategy = STRATEGIES[args.strategy](context_parallel=ContextParallel(args.share))
    fabric = Fabric(
        accelerator=args.accelerator, strategy=strategy, devices=args.devices, precision=args.precision
    )
    fabric.launch(train, args)


if __name__ == "__main__":
    main()
