"""A transformer whose weights, gradients and optimizer states are split over processes (FSDP2).

Nothing is downloaded. The loop is that of language_model.py; the comments say what splitting changes. With
--strategy zero2 weights stay whole from forward to backward, which saves messages; see also --devices 4.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.strategies import STRATEGY_REGISTRY

TEXT = "\n".join(topics[name] for name in sorted(topics))  # Python's own help
ALPHABET = {character: i for i, character in enumerate(sorted(set(TEXT)))}


class Block(nn.TransformerEncoderLayer):
    """Attention to the past, then a perceptron."""

    def forward(self, x):
        """(batch, time, width) to the same shape."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return super().forward(x, mask, is_causal=True)


def make_model(width=64):
    """Characters to logits of each next one. No dropout: ranks would drop other units than one process."""
    blocks = [Block(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(len(ALPHABET), width), *blocks, nn.Linear(width, len(ALPHABET)))


def loss_of(model, windows):
    """Mean loss per character of windows (batch, 65)."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(fabric, args):
    """The work of every rank."""
    windows = torch.tensor([ALPHABET[character] for character in TEXT]).unfold(0, 65, 65)
    held_out, windows = windows[:64], windows[64 : 64 + args.steps * args.batch_size]
    fabric.seed_everything(0, verbose=False)
    with fabric.init_module(empty_init=True):  # no memory yet: the whole model is never on one device
        model = make_model()
    model = fabric.setup_module(model)  # every rank makes its part, with the values of a plain construction
    # After setup, since "fsdp_cpu_offload" asks for it; else fabric.setup(model, optimizer) does both.
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
    # On one device nothing is split, and parameters are plain tensors.
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    held = sum(part.numel() for part in parts)
    fabric.print(f"rank 0 holds {held} of {sum(p.numel() for p in model.parameters())} parameters")

    # Sizes that divide: all ranks make every training step together, and a mean of means is then the mean.
    rows = args.batch_size // args.accumulate // fabric.world_size
    loaders = [DataLoader(part, batch_size=rows) for part in (windows, held_out)]
    loader, held_out_loader = fabric.setup_dataloaders(*loaders)
    for i, batch in enumerate(loader, start=1):
        ends_step = i % args.accumulate == 0
        # Gradients inside no_backward_sync stay whole on each rank: fewer messages for more memory.
        with fabric.no_backward_sync(model, enabled=not ends_step):
            fabric.backward(loss_of(model, batch) / args.accumulate)
        if ends_step:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)  # by the norm of the whole model
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        loss = sum(loss_of(model, batch) for batch in held_out_loader) / len(held_out_loader)
    loss = fabric.all_reduce(loss).item()

    path = Path(fabric.broadcast(tempfile.mkdtemp() if fabric.is_global_zero else None), "model.ckpt")
    # One file with the plain model's names; without format= a directory into which each rank writes its part.
    fabric.save(path, {"model": model}, format="full")
    if fabric.is_global_zero:
        plain = make_model().to(fabric.device)
        plain.load_state_dict(torch.load(path, weights_only=True)["model"])
        shutil.rmtree(path.parent)
        alone = loss_of(plain, held_out.to(fabric.device)).item()
        print(
            f"sharded: {fabric.world_size} process(es), held-out loss {loss:.6f}; of the saved weights in "
            f"one plain process {alone:.6f}: {'the same' if abs(alone - loss) < 1e-4 else 'NOT the same'}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A transformer that is split over processes.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--strategy", default="fsdp", help="or zero2, hsdp, fsdp_cpu_offload")
    parser.add_argument("--devices", default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per step, of all processes")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards per step")
    args = parser.parse_args()
    # A block is gathered, computed and freed at a time; what is in no block goes with the model.
    strategy = STRATEGY_REGISTRY.get(args.strategy, auto_wrap_policy={Block})
    Fabric(accelerator=args.accelerator, strategy=strategy, devices=args.devices).launch(train, args)
