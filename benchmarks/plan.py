"""`fabric plan` against the truth: predicted and measured peaks of memory on the pretend accelerator.

PYTHONPATH=tests/pretend/device python benchmarks/plan.py [--ranks 1,2,4] [--models mlp,...] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import show_and_write, table
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, LENGTH = 64, 2000, 32
MODELS = ("mlp", "convnet", "transformer", "checkpointed", "embedding", "lora")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


class Block(nn.Module):
    """A block of a transformer, with attention by hand: kernels differ between devices."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.again else self.run(x)

    def run(self, x):
        q, k, v = [
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        ]
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(*[Block(again) for _ in range(4)])

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


class LoRA(nn.Module):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.whole = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x):
        return torch.relu(self.whole(x) + self.up(self.down(x)))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mlp":
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]
        return nn.Sequential(*layers, nn.Linear(256, 8))
    if name == "convnet":
        sizes = [3, 16, 32, 64]
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in pairwise(sizes)
        ]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 8))
    if name == "embedding":
        return nn.Sequential(nn.Embedding(20000, 32), nn.Flatten(), nn.Linear(32 * LENGTH, 8))
    if name == "lora":
        return nn.Sequential(*[LoRA(256) for _ in range(6)], nn.Linear(256, 8))
    return Transformer(name == "checkpointed")


def batch_of(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    labels = torch.randint(8, (rows,), generator=draws)
    if name == "convnet":
        return torch.randn(rows, 3, 32, 32, generator=draws), labels
    if name in ("mlp", "lora"):
        return torch.randn(rows, 256, generator=draws), labels
    words = torch.randint(WORDS, (rows, LENGTH), generator=draws)
    return words, labels if name == "embedding" else words


ROWS = {"mlp": 64, "convnet": 16, "transformer": 8, "checkpointed": 8, "embedding": 64, "lora": 64}


def train(fabric: Any, name: str, optimizer: str, rows: int, steps: int = 3, after_setup: Any = None) -> Any:
    """The loop of all cases: what the model needs is held until it ends."""
    model = build(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, stepped = fabric.setup(model, OPTIMIZERS[optimizer](trained))
    inputs, labels = batch_of(name, rows * steps)
    data = torch.utils.data.TensorDataset(inputs, labels)
    loader = fabric.setup_dataloaders(
        torch.utils.data.DataLoader(data, batch_size=rows), use_distributed_sampler=False
    )
    if after_setup is not None:
        after_setup()
    for x, y in loader:
        stepped.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        fabric.backward(loss)
        stepped.step()
    return model, stepped


def measured(strategy: str, precision: str, *case: Any) -> int:
    """The most bytes at once on this rank's pretend device. All ranks must call this."""
    import torch.distributed as dist

    from fabric import Fabric

    gc.collect()
    before = torch.sim.memory_allocated()
    fabric = Fabric(accelerator="sim", devices=dist.get_world_size(), strategy=strategy, precision=precision)
    fabric.launch()
    train(fabric, *case, after_setup=torch.sim.reset_peak_memory_stats)
    most = torch.sim.max_memory_allocated() - before
    fabric.strategy.teardown()
    return most


def predicted(strategy: str, precision: str, ranks: int, *case: Any) -> Any:
    """What `fabric plan` finds for the same loop."""
    import fabric
    from fabric.tools.plan.simulate import Case, simulate, simulate_all

    def loop() -> None:
        job = fabric.Fabric()
        job.launch()
        train(job, *case)

    run = simulate_all if strategy == "pipeline" else simulate
    return run(Case(ranks, strategy=strategy, precision=precision), loop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--precisions", default="32-true,bf16-mixed")
    parser.add_argument("--out", type=Path, help="also write a results file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from fabric.testing import RankPool

    begin, rows, worst = time.perf_counter(), [], 0.0
    lists = [
        getattr(options, name).split(",") for name in ("models", "optimizers", "precisions", "strategies")
    ]
    worlds = [int(world) for world in options.ranks.split(",")]
    with RankPool(max(worlds), timeout=60.0, accelerator="sim") as pool:
        for name, optimizer, precision, strategy in product(*lists):
            if strategy == "pipeline" and name in ("transformer", "checkpointed"):
                continue  # their layers are no chain
            cells = []
            for world in worlds:
                case = (name, optimizer, ROWS[name])
                found = predicted(strategy, precision, world, *case)
                if found.error:
                    raise SystemExit(f"{name} {strategy}: {found.error}")
                truth = max(pool.run(measured, strategy, precision, *case, world_size=world))
                off = found.peak.bytes / truth - 1
                worst = max(worst, abs(off))
                cells += [f"{truth:,}", f"{100 * off:+.1f} %"]
            rows.append([name, optimizer, precision, strategy, *cells])
            print(*rows[-1], flush=True)
    head = ["model", "optimizer", "precision", "strategy"]
    head += [text for world in worlds for text in (f"{world}: bytes", "error")]
    text = (
        "Peak of device memory from after setup to the third step, on the rank with most; error: predicted / "
        f"measured - 1. Largest: {100 * worst:.1f} %. {time.perf_counter() - begin:.0f} s for all."
    )
    tables = [table("Predicted against measured peak, on the pretend accelerator", head, rows, text)]
    show_and_write(tables, options.out)


if __name__ == "__main__":
    main()
