"""Bytes per parameter and rank of every layout, fp32 with Adam: live tensors, and resident memory (Linux)."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from harness import ranks, report, show, summarise, table
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from harness import Table
    from torch import Tensor

WIDTH, DEPTH, BATCH = 2048, 24, 2
"""24 equal layers, which divide by 4: 100.7 M parameters. Two samples: activations are 0.4 MB."""
SMALL = (16, 4)
"""Width and depth of the model by which a process loads all code before its baseline is taken."""
WORLDS = (2, 4)
MIB = 2**20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Freed tensors go back to the system at once; else malloc keeps what it likes, by its history."""


@dataclass(frozen=True)
class Case:
    """A layout, what a rank is to hold (N ranks, blocks of 1 / DEPTH), and when it holds most."""

    name: str
    text: str
    formula: Callable[[int], float]
    moment: str = "after the step"


CASES = {
    case.name: case
    for case in (
        Case("raw DDP", "20", lambda n: 20),
        Case("ddp", "16", lambda n: 16),
        Case("zero1", "8 + 8/N", lambda n: 8 + 8 / n),
        Case("zero2", "4 + 12/N", lambda n: 4 + 12 / n, "end of forward"),
        Case("zero3", "16/N + a block", lambda n: 16 / n + 4 / DEPTH, "end of backward, a block gathered"),
        Case(
            "raw fully_shard",
            "16/N + a block",
            lambda n: 16 / n + 4 / DEPTH,
            "end of backward, a block gathered",
        ),
        Case("raw DDP + ZeroRedundancyOptimizer", "12 + 8/N", lambda n: 12 + 8 / n),
    )
}
MOMENTS = (
    "after setup",
    "end of forward",
    "end of backward, a block gathered",
    "after backward",
    "after the step",
)
REFERENCES = ("raw fully_shard", "raw DDP + ZeroRedundancyOptimizer")
"""Measured at the largest world only."""
BUILDS = ("raw DDP", "raw fully_shard", "zero3", "zero3, empty_init", "zero2, empty_init")
KINDS = ("parameters", "gradients", "optimizer", "buckets", "gathered", "other")


class Loop:
    """A model, its optimizer and what makes a step of them, in the process group that exists.

    Args:
        name: A key of CASES.
        shape: Width and depth of the model.
        empty: Whether the model is built without memory for its weights.
    """

    def __init__(self, name: str, shape: tuple[int, int], empty: bool) -> None:
        self.backward: Callable[[Any], Any] = torch.Tensor.backward
        self.x = torch.ones(BATCH, shape[0])
        if name.startswith("raw"):
            self.module, self.replica = raw_model(name, shape)
            self.optimizer: Any = raw_optimizer(name, self.module)
            self.model, self.step = self.replica, self.optimizer.step
        else:
            self._set_up(name, shape, empty)
        # Now, while they are the split ones: between gathering and freeing a module shows whole ones.
        self.parameters = list(self.module.parameters())
        self.views: dict[int, int] = {}  # DDP's buckets of which gradients are views: address to bytes

    def _set_up(self, name: str, shape: tuple[int, int], empty: bool) -> None:
        from fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=name)
        fabric.launch()
        with fabric.init_module(empty_init=empty):
            self.module = network(*shape)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-4)
        self.model, optimizer = fabric.setup(self.module, self.optimizer)
        self.backward, self.step = fabric.backward, optimizer.step
        self.replica = self.model._forward_module if name in ("ddp", "zero1") else None
        self.fabric = fabric

    def run(self, note: Callable[[str], None] | None = None) -> None:
        """One step from zero_grad to step; `note` is called at MOMENTS."""
        self.optimizer.zero_grad()
        handle = None
        if note is not None:
            # A layer's hook on its output comes after FSDP2's own, which gathers: the last backward of all.
            first = next(m for m in self.module.modules() if isinstance(m, nn.Linear))
            handle = first.register_forward_hook(
                lambda layer, args, out: out.register_hook(lambda grad: note(MOMENTS[2])) and None
            )
        loss = self.model(self.x).square().mean()
        if note is not None:
            note(MOMENTS[1])
        self.backward(loss)
        if isinstance(self.replica, DistributedDataParallel) and self.replica.gradient_as_bucket_view:
            storages = [p.grad.untyped_storage() for p in self.parameters]
            self.views = {storage.data_ptr(): storage.nbytes() for storage in storages}
        if handle is not None and note is not None:
            handle.remove()
            note(MOMENTS[3])
        self.step()
        if note is not None:
            note(MOMENTS[4])


def network(width: int, depth: int) -> nn.Sequential:
    """`depth` square layers, each followed by a ReLU."""
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


def raw_model(name: str, shape: tuple[int, int]) -> tuple[nn.Module, Any]:
    """The model by torch alone, and what is called: DDP around it, or itself, sharded layer by layer."""
    module = network(*shape)
    if "DDP" in name:
        return module, DistributedDataParallel(module)
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return module, fully_shard(module)


def raw_optimizer(name: str, module: nn.Module) -> Any:
    """Adam, with torch's division of its states where the name says so."""
    if "ZeroRedundancy" not in name:
        return torch.optim.Adam(module.parameters(), lr=1e-4)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=1e-4)


def held(loop: Loop) -> dict[str, int]:
    """Bytes of the storages that live on this rank, each counted once, under the first kind that has it."""
    seen: set[int] = set()

    def fresh(tensors: Iterable[Tensor]) -> int:
        total = 0
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage.nbytes() and storage.device.type != "meta" and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    local = getattr(loop.optimizer, "optim", loop.optimizer)
    found = {
        "parameters": fresh(loop.parameters),
        "gradients": fresh([p.grad for p in loop.parameters if p.grad is not None]),
        "optimizer": fresh(
            [v for s in local.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        ),
        "buckets": sum([size for address, size in loop.views.items() if address not in seen]),
        "gathered": fresh(gathered(loop.module)),
    }
    seen |= loop.views.keys()
    if isinstance(loop.replica, DistributedDataParallel) and not loop.views:
        found["buckets"] = buckets(loop.replica)
    # What Python can reach: activations, messages, whatever somebody forgot to let go of.
    live = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    found["other"] = fresh([t for t in live if t.layout is torch.strided and not hasattr(t, "_local_tensor")])
    return found


def buckets(replica: Any) -> int:
    """Bytes of DDP's buckets, by its own log."""
    log = replica._get_ddp_logging_data()
    sizes = log.get("rebuilt_bucket_sizes") or log["bucket_sizes"]
    return sum([int(size) for size in sizes.split(",")])


def gathered(module: nn.Module) -> Iterable[Tensor]:
    """The memory that FSDP2 gathers parameters into; without any while they are split."""
    from fabric.core.torch_versions import groups_of

    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in groups_of(part._get_fsdp_state()):
                for parameter in group.fsdp_params:
                    yield from parameter.all_gather_outputs


def settled() -> int:
    """Resident bytes of this process, after garbage collection and malloc_trim."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def resident() -> int:
    """Resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak(call: Callable[[], Any]) -> int:
    """The most resident bytes while `call` runs."""
    settled()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM becomes VmRSS
    call()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def warmed(name: str, empty: bool) -> int:
    """Resident bytes when all code is loaded and nothing is held: two steps of a small model went before."""
    dist.init_process_group("gloo")
    loop = Loop(name, SMALL, empty)
    for _ in range(2):
        loop.run(lambda moment: None)
    del loop
    return settled()


def observe(name: str) -> dict[str, Any]:
    """What this rank holds at each moment of the second step, and the peaks of the third."""
    base = warmed(name, empty=True)
    loop = Loop(name, (WIDTH, DEPTH), empty=True)
    moments: dict[str, Any] = {}

    def note(moment: str) -> None:
        moments[moment] = {**held(loop), "resident": settled() - base}

    note(MOMENTS[0])
    loop.run()  # DDP makes its buckets anew after the first step
    loop.run(note)
    loop.optimizer.zero_grad()
    peaks = {"forward and backward": peak(lambda: loop.backward(loop.model(loop.x).square().mean())) - base}
    peaks["step"] = peak(loop.step) - base
    return {"moments": moments, "peaks": peaks, "baseline": base}


def construct(name: str) -> dict[str, Any]:
    """The most resident memory while a model and its optimizer are made and set up, and what stays."""
    strategy, _, empty = name.partition(", ")
    base = warmed(strategy, bool(empty))
    made: list[Loop] = []
    most = peak(lambda: made.append(Loop(strategy, (WIDTH, DEPTH), bool(empty)))) - base
    return {"peak": most, "held": settled() - base, "counted": sum(held(made[0]).values())}


def on_a_rank(what: str, name: str) -> None:
    """Measure, and let rank zero report what all ranks saw."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mine = observe(name) if what == "observe" else construct(name)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, mine)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        report(results)


def parameters() -> int:
    """Elements of the model."""
    return DEPTH * (WIDTH * WIDTH + WIDTH)


def counted(sizes: dict[str, int]) -> int:
    """Bytes of all kinds."""
    return sum([sizes[kind] for kind in KINDS])


def largest(results: list[Any], moment: str) -> dict[str, int]:
    """What the rank holds that holds most at this moment."""
    return max([result["moments"][moment] for result in results], key=counted)


def formula_table(found: dict[tuple[str, int], list[Any]], world: int) -> Table:
    """Each layout against its formula and against raw DDP, at the moment that the formula is of."""
    scale, rows = parameters(), []
    names = [name for name, ranks_of in found if ranks_of == world]
    raw = largest(found["raw DDP", world], CASES["raw DDP"].moment)
    item = table(f"Bytes per parameter and rank, {world} ranks", [], rows)
    for name in names:
        case = CASES[name]
        sizes, due = largest(found[name, world], case.moment), case.formula(world)
        seen = max([result["moments"][case.moment]["resident"] for result in found[name, world]])
        total = counted(sizes)
        rows.append([
            name, case.text, case.moment, f"{due:.3f}", f"{total / scale:.3f}", f"{total / scale / due:.3f}",
            f"{seen / scale:.3f}", f"{seen / scale / due:.3f}", f"{total / counted(raw) - 1:+.1%}",
            f"{seen / raw['resident'] - 1:+.1%}",
        ])  # fmt: skip
        if name in ("ddp", "zero1", "zero2", "zero3"):
            values = {"ours": f"{total / scale:.2f} (resident {seen / scale:.2f})"}
            what = f"{name}, {world} ranks, bytes per parameter ({case.text})"
            summarise(item, what, values, f"{due:.2f}", "within 10 %")
    head = ["layout", "formula", "at", "due", "counted", "ratio", "resident", "ratio"]
    item["head"] = [*head, "counted, to raw DDP", "resident, to raw DDP"]
    return item


def kinds_table(found: dict[tuple[str, int], list[Any]], world: int) -> Table:
    """What is held at each moment, by kind."""
    scale, rows = parameters(), []
    for (name, ranks_of), results in found.items():
        for moment in MOMENTS if ranks_of == world else ():
            sizes = largest(results, moment)
            seen = max([result["moments"][moment]["resident"] for result in results])
            cells = [f"{sizes[kind] / scale:.3f}" for kind in KINDS]
            rows.append([name, moment, *cells, f"{counted(sizes) / scale:.3f}", f"{seen / scale:.3f}"])
    return table(
        f"By kind and moment, bytes per parameter, {world} ranks",
        ["layout", "at", *KINDS, "all", "resident"],
        rows,
    )


def peaks_table(found: dict[tuple[str, int], list[Any]]) -> Table:
    """Peaks of resident memory, temporaries of the kernels and messages included."""
    rows = []
    for (name, world), results in found.items():
        cells = [max([r["peaks"][what] for r in results]) / parameters() for what in results[0]["peaks"]]
        base = max([r["baseline"] for r in results]) / MIB
        rows.append([name, str(world), *[f"{cell:.3f}" for cell in cells], f"{base:.0f}"])
    note = (
        "The most resident memory over the baseline in bytes per parameter: with what kernels, messages and "
        "Adam need for a moment."
    )
    head = ["layout", "ranks", "forward and backward", "step", "baseline MiB"]
    return table("Peaks of resident memory in a step", head, rows, note)


def build_table(built: dict[str, list[Any]]) -> Table:
    """Peaks of construction and setup."""
    most = {name: max([result["peak"] for result in results]) for name, results in built.items()}
    rows = []
    for name, results in built.items():
        stays = max([result["held"] for result in results])
        cells = [most[name], stays, max([result["counted"] for result in results])]
        shares = [most[name] / most[base] for base in BUILDS[:3]]
        rows.append([name, *[f"{cell / MIB:.0f}" for cell in cells], *[f"{share:.3f}" for share in shares]])
    note = (
        f"Over the baseline, 4 ranks. The whole model is {4 * parameters() / MIB:.0f} MiB, a part a quarter."
    )
    head = ["build", "peak MiB", "stays", "counted", *[f"peak to {base}" for base in BUILDS[:3]]]
    item = table("Resident memory of construction and setup", head, rows, note)
    shares = [most["zero3, empty_init"] / most[base] for base in ("zero3", "raw DDP")]
    values = {"ours": f"{shares[0]:.2f} (of raw DDP's {shares[1]:.2f})"}
    summarise(
        item, "construction peak, zero3 with empty_init, of plain zero3's, 4 ranks", values, "0.25", "<= 0.17"
    )
    return item


NOTES = """Counted: live tensors, each storage of the rank once, by its address. Resident:
/proc/self/statm less a baseline after two steps of a small model, both after gc and malloc_trim. Each
layout in fresh processes, the rank that holds most. Models are built under init_module(empty_init=True)
where the layout has that. A formula is of the layout's fullest moment; a block is a layer. The CPU's Adam
steps one parameter at a time, without foreach."""
KINDS_NOTE = """Buckets: of DDP, by its own log where gradients are no views of them; before the first
backward they are not resident yet. Gathered: what FSDP2 gathers into. Other: any tensor that Python can
reach besides: activations (0.004), the last reduction's message, which FSDP2 keeps until the next, and
what leaks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rank", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="also write all raw numbers, as JSON")
    options = parser.parse_args()
    if options.rank:
        on_a_rank(*options.rank)
        return
    common = {"OMP_NUM_THREADS": "1", **MALLOC}
    found = {
        (name, world): ranks([__file__, "observe", name], world, **common)
        for world in WORLDS
        for name in CASES
        if world == WORLDS[-1] or name not in REFERENCES
    }
    built = {name: ranks([__file__, "construct", name], 4, **common) for name in BUILDS}
    tables = [formula_table(found, world) for world in WORLDS]
    tables[0]["note"] = NOTES
    tables += [build_table(built), peaks_table(found), *[kinds_table(found, world) for world in WORLDS]]
    if options.out:
        raw = {"observe": {f"{name}, {world}": r for (name, world), r in found.items()}, "construct": built}
        options.out.write_text(json.dumps(raw, indent=1), encoding="utf-8")
    show(tables)


if __name__ == "__main__":
    main()
