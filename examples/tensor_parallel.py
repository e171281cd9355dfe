"""A transformer whose layers are split over processes (tensor parallel), the data over what remains of them.

Two processes hold halves of one model; four hold two such pairs, which see different data:

    python examples/tensor_parallel.py --devices 2
    python examples/tensor_parallel.py --devices 4

The sequences are counts with a step that the model has to find: 3 5 7 9 ... modulo 10.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy


class Block(nn.Module):
    """Attention to the past, then a perceptron. A rank has some of the heads: their number is not fixed."""

    def __init__(self, width=64, head=16):
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """(batch, time, width) to the same shape."""
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Digits (batch, time) to logits of each next one."""

    def __init__(self, width=64, layers=2):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        """Logits (batch, time, 10)."""
        return self.head(self.blocks(self.embed(x)))


def parallelize(model, mesh):
    """What `fabric.setup` calls on every rank, with the mesh of data parallel and tensor parallel ranks."""
    for block in model.blocks:
        # Columns first, rows second: what lies between (heads, hidden units) is split and never gathered, so
        # that there is one sum over ranks for the attention and one for the perceptron.
        columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        parallelize_module(
            block, mesh["tensor_parallel"], {**columns, "out": RowwiseParallel(), "down": RowwiseParallel()}
        )
    if mesh["data_parallel"].size() > 1:  # FSDP2 splits each rank's part once more, over the other axis
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
    return model


def load_data(count=2048, length=16):
    """Sequences of digits (count, length + 1)."""
    generator = torch.Generator().manual_seed(0)
    start, step = torch.randint(0, 10, (2, count, 1), generator=generator)
    return (start + step * torch.arange(length + 1)) % 10


def train(fabric, args):
    """The work of every rank. Returns the last epoch's mean loss, the same on all ranks."""
    fabric.seed_everything(args.seed, verbose=False)  # alike on all ranks: they build one model
    with fabric.init_module(empty_init=True):
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)

    # Ranks of one tensor parallel group see the same batches: fabric shards by the data parallel rank.
    replicas = fabric.device_mesh["data_parallel"].size()
    loader = DataLoader(load_data(), batch_size=args.batch_size // replicas, shuffle=True, drop_last=True)
    loader = fabric.setup_dataloaders(loader)
    for epoch in range(args.epochs):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            total += loss.detach() / len(loader)
        mean = fabric.all_reduce(total).item()  # over all ranks: tensor parallel ones have equal losses
        fabric.print(f"epoch {epoch}: loss {mean:.4f}")

    up = model.blocks[0].up.weight
    fabric.print(f"rank 0 holds {tuple(up.to_local().shape)} of {tuple(up.shape)} of blocks.0.up.weight")
    fabric.print(f"tensor_parallel: {fabric.world_size} process(es), loss {mean:.6f}")
    return mean


def main():
    """Read the command line, start the ranks."""
    parser = argparse.ArgumentParser(description="Tensor parallel, and FSDP2 over the other axis.")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=2, help="processes that share one replica")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    strategy = ModelParallelStrategy(
        parallelize,
        data_parallel_size="auto",
        tensor_parallel_size=min(args.tensor_parallel, args.devices),
    )
    fabric = Fabric(
        accelerator=args.accelerator, strategy=strategy, devices=args.devices, precision=args.precision
    )
    fabric.launch(train, args)


if __name__ == "__main__":
    main()
