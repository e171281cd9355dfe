"""A character-level transformer on English text: gradient accumulation, clipping, a schedule, a checkpoint.

The text is the help that ships with Python itself (`pydoc_data.topics`, some 700 kB); nothing is downloaded.
Order of reading: Model, train, evaluate. Run it under any launcher, for example

    python examples/language_model.py --devices 2
    fabric run --devices 2 --precision bf16-mixed examples/language_model.py
"""

import argparse
import math
import shutil
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from tqdm import tqdm

from fabric import Fabric

CONTEXT = 64
"""Characters that the model sees at once."""


class Block(nn.Module):
    """Attention to the past, then a perceptron; no dropout: ranks would drop different units."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        """(batch, time, width) to the same shape."""
        batch, time_, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time_, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_, width))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Characters (batch, time) to logits of the next one (batch, time, vocabulary)."""

    def __init__(self, vocabulary, width=64, layers=2, heads=4):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        """Logits of each next character."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, tokens, count):
        """`tokens` (1, time) with `count` more characters, drawn from what the model finds probable."""
        for _ in range(count):
            logits = self(tokens[:, -CONTEXT:])[:, -1]
            drawn = torch.multinomial((logits.float() / 0.7).softmax(-1), 1)
            tokens = torch.cat([tokens, drawn], dim=1)
        return tokens


def load_text():
    """Training and held-out windows of CONTEXT + 1 characters, and the alphabet."""
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    codes = torch.tensor([index[character] for character in text])
    windows = TensorDataset(codes.unfold(0, CONTEXT + 1, CONTEXT + 1))
    held_out = range(0, len(windows), 20)
    rest = [i for i in range(len(windows)) if i % 20]
    return Subset(windows, rest), Subset(windows, held_out), alphabet


def train(fabric, args):
    """The work of every rank. Returns the held-out loss, the same on all ranks."""
    fabric.seed_everything(args.seed, verbose=False)
    train_windows, held_out, alphabet = load_text()

    with fabric.init_module():  # made on the device, in the precision's dtype
        model = Model(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    # A schedule needs no setup: it counts the optimizer's steps, which are as many on 1 and on N processes.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
    )
    model, optimizer = fabric.setup(model, optimizer)

    micro_batch = args.batch_size // args.accumulate // fabric.world_size
    loader = DataLoader(train_windows, batch_size=micro_batch, shuffle=True, drop_last=True)
    held_out_loader = DataLoader(held_out, batch_size=32)
    loader, held_out_loader = fabric.setup_dataloaders(loader, held_out_loader)

    start = time.perf_counter()
    batches = endless(loader)
    bar = tqdm(range(args.steps), desc="steps", leave=False, disable=None if fabric.is_global_zero else True)
    for step in bar:
        optimizer.zero_grad()
        step_loss = 0.0
        for part in range(args.accumulate):
            (window,) = next(batches)
            # Only the last part of a step sends gradients to the other ranks; the others stay local.
            with fabric.no_backward_sync(model, enabled=part < args.accumulate - 1):
                loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
                fabric.backward(loss / args.accumulate)
            step_loss += loss.detach() / args.accumulate
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % args.report_every == 0:
            mean = fabric.all_reduce(step_loss).item()
            fabric.print(f"step {step + 1}: loss {mean:.4f}, lr {schedule.get_last_lr()[0]:.2e}")
    characters = args.steps * args.batch_size * CONTEXT
    speed = characters / (time.perf_counter() - start)

    before = evaluate(fabric, model, held_out_loader)
    after = save_and_load(fabric, model, optimizer, held_out_loader, len(alphabet))
    if after != before:
        raise RuntimeError(f"held-out loss {before} became {after} by saving and loading")
    if fabric.is_global_zero:  # no rank waits here: a forward under no_grad makes no collective
        prompt = torch.tensor([[alphabet.index(c) for c in "The "]], device=fabric.device)
        written = model.generate(prompt, 40)[0].tolist()
        print("the model writes:", repr("".join(alphabet[i] for i in written)))
    fabric.print(
        f"language_model: {fabric.world_size} process(es), held-out loss {before:.6f}, "
        f"{before / math.log(2):.4f} bits per character, {speed:,.0f} characters/s"
    )
    return before


def endless(loader):
    """Epoch after epoch; each pass over a set-up loader has an order of its own."""
    while True:
        yield from loader


@torch.no_grad()
def evaluate(fabric, model, loader):
    """Mean loss per held-out character; every window is seen once, on one rank."""
    model.eval()
    total, count = torch.zeros((), device=fabric.device, dtype=torch.float64), 0
    for (window,) in loader:
        logits = model(window[:, :-1]).flatten(0, 1)
        total += F.cross_entropy(logits, window[:, 1:].flatten(), reduction="sum")
        count += window[:, 1:].numel()
    model.train()
    sums = fabric.all_reduce({"loss": total, "count": count}, reduce_op="sum")
    return sums["loss"].item() / int(sums["count"])


def save_and_load(fabric, model, optimizer, loader, vocabulary):
    """The held-out loss of a fresh model that reads what this one saved. All ranks must call this."""
    folder = tempfile.mkdtemp() if fabric.is_global_zero else None
    path = Path(fabric.broadcast(folder)) / "model.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer})
    with fabric.init_module(empty_init=True):
        fresh = Model(vocabulary)
    fresh = fabric.setup_module(fresh)
    fabric.load(path, {"model": fresh}, strict=False)  # the file holds the optimizer too
    loss = evaluate(fabric, fresh, loader)
    fabric.barrier()
    if fabric.is_global_zero:
        shutil.rmtree(folder)
    return loss


def main():
    """Read the command line, start the ranks."""
    parser = argparse.ArgumentParser(description="A character-level transformer on Python's own help text.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="windows per step, of all processes together"
    )
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--report-every", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    fabric = Fabric(
        accelerator=args.accelerator, strategy=args.strategy, devices=args.devices, precision=args.precision
    )
    fabric.launch(train, args)


if __name__ == "__main__":
    main()
