"""A character-level transformer in stages, one on each process: the loop is that of one process.

Nothing is downloaded. Each process holds the blocks of its stage; batches follow each other through the
stages in micro-batches, and every process computes the loss. Any number of processes prints the same losses:

    python examples/pipeline.py --devices 1
    python examples/pipeline.py --devices 2
    python examples/pipeline.py --devices 2 --one-call
    python examples/pipeline.py --devices 4 --stages 2

--one-call makes forward, loss and backward in turns (1F1B); the last line runs two pipelines, each with half
of every batch.
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.strategies import PipelineStrategy

TEXT = "\n".join(topics[name] for name in sorted(topics))  # Python's own help
ALPHABET = {character: i for i, character in enumerate(sorted(set(TEXT)))}
CONTEXT = 64


class Embedding(nn.Embedding):
    """Characters (batch, time) to (batch, time, width), with their positions."""

    def __init__(self, width):
        super().__init__(len(ALPHABET), width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)

    def forward(self, characters):
        return super().forward(characters) + self.position[: characters.shape[1]]


class Block(nn.TransformerEncoderLayer):
    """Attention to the past, then a perceptron."""

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return super().forward(x, mask, is_causal=True)


class Model(nn.Module):
    """Characters to logits of each next one. Embedding and head share a weight, also on two stages."""

    def __init__(self, width=64, layers=4, dropout=0.0):
        super().__init__()
        self.embedding = Embedding(width)
        self.layers = nn.ModuleList(
            Block(width, 4, 2 * width, dropout=dropout, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.1)

    def pipeline_blocks(self):
        """Where the model may be cut: each takes what the one before returned."""
        return [self.embedding, *self.layers, self.head]

    def forward(self, characters):
        x = characters
        for block in self.pipeline_blocks():
            x = block(x)
        return x


def loss_of(logits, targets):
    """Mean loss per character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(fabric, args):
    """The work of every process. Prints the same losses on any number of stages."""
    fabric.seed_everything(0, verbose=False)  # all alike, as for one model on one device
    windows = torch.tensor([ALPHABET[character] for character in TEXT]).unfold(0, CONTEXT + 1, CONTEXT + 1)
    held_out, windows = windows[:64], windows[64 : 64 + args.steps * args.batch_size]

    model = Model(dropout=args.dropout)  # draws other numbers where a model is cut elsewhere
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer = fabric.setup(model, optimizer)  # from here on, those of other stages are empty
    held = sum(parameter.numel() for parameter in model.parameters())
    fabric.print(f"rank 0 holds {held} of {total} parameters")

    # Processes of one pipeline see the same batches; several pipelines share them out.
    rows = args.batch_size // fabric.strategy.distributed_sampler_kwargs["num_replicas"]
    loader = fabric.setup_dataloaders(DataLoader(windows, batch_size=rows))
    for step, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        characters, targets = batch[:, :-1], batch[:, 1:]
        if args.one_call:
            loss = model.pipeline_step(characters, targets, loss_of)
        else:
            loss = loss_of(model(characters), targets)
            fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)  # by the norm of the whole model
        optimizer.step()
        if step % args.report_every == 0:
            fabric.print(f"step {step}: loss {fabric.all_reduce(loss.detach()).item():.4f}")

    model.eval()
    with torch.no_grad():
        loss = loss_of(model(held_out[:, :-1].to(fabric.device)), held_out[:, 1:].to(fabric.device)).item()
    fabric.print(
        f"pipeline: {fabric.world_size} process(es), held-out loss {loss:.6f}, {loss / math.log(2):.4f} bits "
        "per character"
    )


def main():
    """Read the command line, start the processes."""
    parser = argparse.ArgumentParser(description="A character-level transformer in stages.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--stages", type=int, default=None, help="of each pipeline; default: all processes")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument(
        "--one-call", action="store_true", help="model.pipeline_step in place of the raw loop"
    )
    parser.add_argument(
        "--batch-size", type=int, default=16, help="windows per step, of all pipelines together"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--report-every", type=int, default=10)
    args = parser.parse_args()

    strategy = PipelineStrategy(num_stages=args.stages, num_microbatches=args.microbatches)
    fabric = Fabric(
        accelerator=args.accelerator, strategy=strategy, devices=args.devices, precision=args.precision
    )
    fabric.launch(train, args)


if __name__ == "__main__":
    main()
