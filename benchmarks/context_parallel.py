"""A sequence divided over 2 ranks: activations, and the time of a step, to those of the whole."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import interleave, on_a_rank, ranks, ratios, show, summarise, table, timing_table
from pipeline import QUIET, peak_live
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Table

WIDTH, HEADS, LAYERS = 128, 4, 4
WHOLE, AGAIN, DIVIDED = "the whole on each rank", "again", "divided over 2 ranks"
ROUNDS = int(os.environ.get("FABRIC_BENCH_ROUNDS", "15"))
MIB = 2**20


class Block(nn.Module):
    """Causal attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.norms[0](x)).chunk(3, -1)
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


def steps(length: int) -> dict[str, Callable[[], Any]]:
    """Forward and backward of the model on one rank and on both; equal results. All ranks call this."""
    from fabric import Fabric
    from fabric.strategies import ContextParallel, DDPStrategy

    torch.manual_seed(0)
    plain = nn.Sequential(*[Block() for _ in range(LAYERS)])
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(context_parallel=ContextParallel()))
    fabric.launch()
    model = fabric.setup(copy.deepcopy(plain))
    x = torch.randn(1, length, WIDTH)

    def whole() -> None:
        plain(x).square().mean().backward()

    def divided() -> None:
        fabric.backward(model(x).square().mean())

    for _ in range(2):  # the trials are over, gradients have their memory
        whole(), divided()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)
    return {WHOLE: whole, AGAIN: whole, DIVIDED: divided}


def measure(lengths: list[int], rounds: int) -> list[Table]:
    """Tables of time and memory. All ranks call this."""
    tables, rows = [], []
    for length in lengths:
        cases = steps(length)
        samples = interleave(cases, rounds, before=dist.barrier)
        what = f"{length} positions, width {WIDTH}, {LAYERS} layers, causal, 2 ranks of one thread"
        item = timing_table(f"Forward and backward: {what}", samples, WHOLE, 1e-3, "ms", "Rank 0's time.")
        found = ratios(samples, WHOLE)
        limit = f"{found[AGAIN]:.3f} (whole again)"
        line = f"context parallel, step to that of the whole on each rank, {what}"
        summarise(item, line, {"ours": f"{found[DIVIDED]:.3f}"}, limit, "0.5 is half of the work")
        tables.append(item)
        most = {name: peak_live(cases[name]) for name in (WHOLE, DIVIDED)}
        dist.barrier()
        share = most[DIVIDED] / most[WHOLE]
        rows.append([str(length), *[f"{value / MIB:.1f}" for value in most.values()], f"{share:.3f}"])
        summarise(
            tables[-1],
            f"the same, peak of activations, {length} positions",
            {"ours": f"{share:.3f}"},
            "",
            "0.5",
        )
    head = ["positions", f"{WHOLE}, MiB", f"{DIVIDED}, MiB", "ratio"]
    note = "The most that torch's allocator gave out within a step, temporaries included; rank 0."
    return [*tables, table("Peak of activations", head, rows, note)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic", nargs="?", choices=["measure", None], help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="small sizes and 3 rounds: only whether it runs")
    options = parser.parse_args()
    if options.topic:
        on_a_rank(lambda: measure([64], 3) if options.quick else measure([1024, 4096], ROUNDS))
        return
    arguments = [__file__, "measure", *sys.argv[1:]]
    show(ranks(arguments, 2, 1200, OMP_NUM_THREADS="1", **QUIET))


if __name__ == "__main__":
    main()
