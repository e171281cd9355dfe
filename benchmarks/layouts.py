"""Step times of sharded and tensor parallel training on 2 ranks, each against torch by hand, in turn."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from harness import as_text, interleave, ranks, ratios, report, show, summarise, table, timing_table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Table

ROUNDS = int(os.environ.get("FABRIC_BENCH_ROUNDS", "60"))
WIDTH, DEPTH, BATCH = 512, 8, 64
"""Eight square layers, 2.1 M parameters; every layer is a group where parameters are split."""
RATE = 1e-4

Loop = tuple[Any, Any, Any]
"""A model, an optimizer, and what takes the loss backward."""


@dataclass(frozen=True)
class Pair:
    """One layout: what makes it by hand and here, the ratio that is wanted, and what it is compared with."""

    name: str
    raw: Callable[[], Loop]
    ours: Callable[[], Loop]
    target: float
    against: str


def network() -> nn.Sequential:
    """Alike on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def adam(model: nn.Module) -> Any:
    """The optimizer of all cases."""
    return torch.optim.Adam(model.parameters(), lr=RATE)


def raw_ddp() -> Loop:
    """torch's DDP with its defaults."""
    model = network()
    return DistributedDataParallel(model), adam(model), torch.Tensor.backward


def raw_zero1() -> Loop:
    """torch's division of optimizer states, over DDP."""
    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=RATE)
    return DistributedDataParallel(model), optimizer, torch.Tensor.backward


def raw_shards(**settings: Any) -> Callable[[], Loop]:
    """`fully_shard` on every layer and on the model."""

    def make() -> Loop:
        model = network()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, **settings)
        fully_shard(model, **settings)
        return model, adam(model), torch.Tensor.backward

    return make


def split(model: nn.Module, mesh: Any) -> nn.Module:
    """Columns, rows, columns, rows, ...: one all_reduce for two layers, forward and backward."""
    plan = {str(2 * i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(DEPTH)}
    return parallelize_module(model, mesh["tensor_parallel"], plan)


def raw_tensor_parallel() -> Loop:
    """`parallelize_module` on a mesh of all ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = split(network(), mesh)
    return model, adam(model), torch.Tensor.backward


def ours(strategy: Callable[[], Any]) -> Callable[[], Loop]:
    """This package."""

    def make() -> Loop:
        from fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy())
        fabric.launch()
        model = network()
        return *fabric.setup(model, adam(model)), fabric.backward

    return make


def fsdp(**settings: Any) -> Callable[[], Any]:
    """FSDPStrategy with the groups of `raw_shards`."""

    def make() -> Any:
        from fabric.strategies import FSDPStrategy

        return FSDPStrategy(auto_wrap_policy={nn.Linear}, **settings)

    return make


def tensor_parallel() -> Any:
    """ModelParallelStrategy with the plan of `raw_tensor_parallel`."""
    from fabric.strategies import ModelParallelStrategy

    return ModelParallelStrategy(split, data_parallel_size=1, tensor_parallel_size=2)


PAIRS = (
    Pair("ddp", raw_ddp, ours(lambda: "ddp"), 1.0, "raw DDP"),
    Pair("zero1", raw_zero1, ours(lambda: "zero1"), 1.0, "raw DDP + ZeroRedundancyOptimizer"),
    Pair(
        "zero2",
        raw_shards(reshard_after_forward=False),
        ours(fsdp(sharding_strategy="SHARD_GRAD_OP")),
        1.05,
        "raw fully_shard(reshard_after_forward=False)",
    ),
    Pair("zero3", raw_shards(), ours(fsdp()), 1.05, "raw fully_shard"),
    Pair("tensor parallel", raw_tensor_parallel, ours(tensor_parallel), 1.05, "raw parallelize_module"),
)


def main() -> None:
    show(ranks([__file__, "rank"], OMP_NUM_THREADS="1", timeout=1500))


def measure() -> None:
    """Time and count every layout; all ranks call this."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(BATCH, WIDTH)
    tables, messages = [], []
    for pair in PAIRS:
        cases = {pair.against: step_of(x, *pair.raw()), "again": step_of(x, *pair.raw())}
        cases["ours"] = step_of(x, *pair.ours())
        tables.append(compare(pair, cases))
        for name in (pair.against, "ours"):
            messages.append([pair.name if name == "ours" else name, *count(cases[name])])
        dist.barrier()
    head = ["layout", "messages a step", "payload MB"]
    note = (
        "Collectives of one step as the process group sees them, DDP's own included. Payload: the whole "
        "tensor (gathered; before it is scattered; reduced; sent). On a ring of 2 a rank sends half for "
        "a gather or a scatter, and all of it for a reduction."
    )
    tables.append(table("Messages of a step", head, messages, note))
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        report(tables)


def compare(pair: Pair, cases: dict[str, Callable[[], None]]) -> Table:
    """Wall time of the steps of one layout; all ranks call this."""
    samples = interleave(cases, ROUNDS, inner=3, warmup=3, before=dist.barrier)
    size = DEPTH * (WIDTH * WIDTH + WIDTH)
    what = f"{pair.name}: a step of {size / 1e6:.1f} M parameters, batch {BATCH}, 2 ranks"
    item = timing_table(f"{what}, target <= {pair.target}", samples, pair.against, 1e-3, "ms")
    values = as_text(ratios(samples, pair.against), "{:.3f}")
    limit = f"{values['again']} (raw again)"
    summarise(item, f"{pair.name} step, 2 ranks, vs {pair.against}", values, limit, f"<= {pair.target}")
    return item


def step_of(x: Any, model: Any, optimizer: Any, backward: Callable[[Any], None]) -> Callable[[], None]:
    """One whole training step."""

    def step() -> None:
        optimizer.zero_grad()
        backward(model(x).square().mean())
        optimizer.step()

    return step


class Messages(TorchDispatchMode):
    """Counts the collectives of this rank, DDP's own in C++ included, and the bytes of their larger side."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any([hasattr(kind, "device_mesh") for kind in types]):
            return NotImplemented  # a DTensor goes first; its collectives on plain tensors come back here
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space and not name.startswith(("wait", "_wrap")):
            self.calls[name.strip("_")] += 1
            self.bytes += max([_bytes(arg) for arg in args])
        return func(*args, **(kwargs or {}))


def _bytes(arg: Any) -> int:
    if isinstance(arg, list | tuple):
        return sum([_bytes(item) for item in arg])
    return arg.nbytes if isinstance(arg, torch.Tensor) else 0


def count(step: Callable[[], None]) -> list[str]:
    """The messages of one step and their megabytes, as text; all ranks call this."""
    with Messages() as seen:
        step()
    calls = [f"{times} {name}" for name, times in sorted(seen.calls.items())]
    return [" + ".join(calls) or "none", f"{seen.bytes / 1e6:.3f}"]


if __name__ == "__main__":
    if os.environ.get("RANK") and sys.argv[1:] == ["rank"]:
        measure()
    else:
        main()
