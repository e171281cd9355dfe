"""A run that is killed in the middle of an epoch and started again: every loss is that of an undisturbed run.

    python examples/resume.py DIR --kill-at 42      # one run; it goes on where the newest file in DIR is
    python examples/resume.py                       # killed, started again, undisturbed: the same losses?

The checkpoint holds the loader (how far the loop has come in the shuffled order, whatever workers have read
ahead) and all ranks' random streams (dropout). What workers draw follows from the batch, and needs no entry.
Killed in the middle of a save, the run goes on from the checkpoint before; asked to stop (SIGTERM), it saves.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile

import numpy
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric


class Digits(Dataset):
    """Handwritten digits, each time with other noise, from three libraries' random streams."""

    def __init__(self):
        self.images, self.labels = load_digits(return_X_y=True)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = numpy.roll(self.images[index].reshape(8, 8) / 16, random.randint(-1, 1), axis=1)
        image = torch.tensor(image + 0.1 * numpy.random.randn(8, 8), dtype=torch.float32).flatten()
        return image * (0.8 + 0.4 * torch.rand(())), self.labels[index]


def train(args):
    """One run, from the beginning or from where the checkpoint in `args.directory` is."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
    loader = DataLoader(Digits(), batch_size=32, shuffle=True, drop_last=True, num_workers=1)
    loader = fabric.setup_dataloaders(loader)
    fabric.seed_everything(0, verbose=False, per_rank=True)  # other dropout on each rank

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "step": 0}
    state |= {"loader": loader, "rng": fabric.rng_state()}
    fabric.load_latest(args.directory, state)  # objects in place; epoch and step are replaced in `state`
    for epoch in range(state["epoch"], 2):
        state["epoch"] = epoch
        for images, labels in loader:  # the first time, the rest of the epoch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            state["step"] += 1
            loss = fabric.all_reduce(loss.detach()).item()
            fabric.print(f"step {state['step']} loss {loss!r}", flush=True)  # all digits
            stops = fabric.should_stop()  # on all ranks in the same step
            if stops or state["step"] % 5 == 0:
                fabric.save_latest(args.directory, state, step=state["step"])  # the newest three stay
            if stops:
                return
            if state["step"] == args.kill_at:
                os.kill(os.getpid(), 9)  # on every rank: nothing is tidied up


def compare(kill_at):
    """Three runs, as a user starts them. Returns the exit code: 1 if their losses differ."""

    def losses(name, *arguments):
        done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
        steps = [line.split(" loss ") for line in done.stdout.splitlines()] or [("no step", "")]
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode  # as a shell has it
        print(f"{name}: {steps[0][0]} to {steps[-1][0]}, exit code {code}", flush=True)
        return dict(steps)

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        whole, killed = losses("undisturbed", one), losses("killed", other, "--kill-at", str(kill_at))
        rest = losses("started again", other)
    same = killed | rest == whole == rest | killed  # steps that both made must be the same in both
    print(f"resume: {f'all {len(whole)} losses identical' if same else 'the losses DIFFER'}")
    return int(not same)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A run that is killed and goes on, with the same losses.")
    parser.add_argument("directory", nargs="?", help="where the run keeps its checkpoint")
    parser.add_argument("--kill-at", type=int, default=0, help="the step after which the run kills itself")
    args = parser.parse_args()
    sys.exit(train(args) if args.directory else compare(args.kill_at or 42))
