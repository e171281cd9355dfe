"""One of 1,024 ranks of a 6.7 B transformer by simulation: bytes held and sent, against closed formulas."""

from __future__ import annotations

import argparse
import contextlib
import math
import resource
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import show_and_write, summarise, table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 2**20
RING = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "broadcast": 1}
"""How often a rank in a ring of G sends (G - 1) / G of the payload (in a broadcast: the mean over ranks)."""
PAYLOAD = {
    "c10d::_allgather_base_": ("all-gather", 0), "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0), "_c10d_functional::all_reduce": ("all-reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
}  # fmt: skip
"""Operator to (kind, which argument is the whole tensor: gathered, before it is scattered, or reduced)."""


@dataclass(frozen=True)
class Config:
    """A model of Llama's shape (no rotary positions: they weigh nothing), tokens per rank, and its split."""

    layout: str = "tp x fsdp"
    dp: int = 128
    tp: int = 8
    vocab: int = 32000
    dim: int = 4096
    layers: int = 32
    heads: int = 32
    hidden: int = 11008
    tokens: int = 2048


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, h, self.width = config.dim, config.hidden, config.dim // config.heads
        self.norm_a, self.norm_b = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in [(d, h), (d, h), (h, d)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_a(x)
        heads = [f(y).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm_b(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def parallelize(model: nn.Module, device_mesh: DeviceMesh, reshard: bool | None = None) -> nn.Module:
    """Split the weights over "tensor_parallel", if the mesh has it, and shard them over "data_parallel"."""
    if "tensor_parallel" in (device_mesh.mesh_dim_names or ()):
        split(model, device_mesh["tensor_parallel"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    data = device_mesh["data_parallel"]
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=data, mp_policy=policy, reshard_after_forward=reshard)
    return model


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism as in Megatron: two all-reduces per block forward, two backward."""
    # One replicated input for q, k and v (and for gate and up): their gradients are summed before one
    # all-reduce. Without this each linear layer reduces its own: 5 per block backward, not 2.
    norm = parallel.PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
    )
    plan = dict.fromkeys(["norm_a", "norm_b"], norm)
    plan |= dict.fromkeys(["q", "k", "v", "gate", "up"], parallel.ColwiseParallel())
    plan |= dict.fromkeys(["o", "down"], parallel.RowwiseParallel())
    for block in model.blocks:
        parallel.parallelize_module(block, mesh, plan)
    plan = {"embedding": parallel.RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = parallel.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallel.parallelize_module(model, mesh, plan)


class Traffic(TorchDispatchMode):
    """Counts the collectives of this rank: calls, payload bytes and ring bytes by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.payload, self.ring = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any([issubclass(kind, DTensor) for kind in types]):
            return NotImplemented  # DTensor goes first; its collectives on plain tensors come back here
        name = func._schema.name
        if name in PAYLOAD:
            self.count(name, args)
        elif "c10d" in name and "::wait" not in name and "::_wrap" not in name:
            raise RuntimeError(f"{name} is not counted: add to PAYLOAD which argument is its whole tensor")
        return func(*args, **(kwargs or {}))

    def count(self, name: str, args: Any) -> None:
        kind, place = PAYLOAD[name]
        tensors = args[place] if isinstance(args[place], (list, tuple)) else [args[place]]
        groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())]
        group = dist.ProcessGroup.unbox(groups[0]) if groups else args[-1]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        self.calls[kind] += 1
        self.payload[kind] += (payload := held(tensors))
        self.ring[kind] += RING[kind] * payload * (group.size() - 1) // group.size()


def held(tensors: Any) -> int:
    """Bytes of this rank's part of `tensors`."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum([t.numel() * t.element_size() for t in parts])


def simulate(config: Config, rank: int = 0) -> dict[str, dict[str, int]]:
    """`measure` as one of dp x tp ranks that do not exist; with tp once per process: DTensor keeps groups."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.dp * config.tp)
    try:
        return measure(config)
    finally:
        dist.destroy_process_group()


def measure(config: Config) -> dict[str, dict[str, int]]:
    """This rank's bytes after one forward, backward and AdamW step in the present group: held, sent."""
    names = ("data_parallel", "tensor_parallel")[: 1 + (config.tp > 1)]
    mesh = init_device_mesh("cpu", (config.dp, config.tp)[: len(names)], mesh_dim_names=names)
    with torch.device("meta"):
        model = Model(config)
    # The mesh is sliced before fake tensors are on: slicing reads its values.
    if config.layout in ("tp x fsdp", "zero3", "zero2"):
        parallelize(model, mesh, reshard=False if config.layout == "zero2" else None)
    fake = dist.get_backend() == "fake"
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext(), Traffic() as seen:
        model.to_empty(device="cpu")
        forward = replicated(model) if config.layout in ("ddp", "zero1") else model
        if config.layout == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(1, config.tokens, dtype=torch.long)
        with parallel.loss_parallel():
            logits = forward(tokens).flatten(0, 1).float()
            F.cross_entropy(logits, tokens.flatten()).backward()
        optimizer.step()
    local = optimizer.optim if config.layout == "zero1" else optimizer
    states = [value for state in local.state.values() for value in state.values()]
    found = {"parameters": held(model.parameters()), "optimizer": held(states)}
    found["gradients"] = held([weight.grad for weight in model.parameters()])
    return {"bytes": found | seen.payload, "calls": dict(seen.calls), "ring": dict(seen.ring)}


def replicated(model: nn.Module) -> nn.Module:
    """DDP with its all-reduce written as a hook: the fake group's own future carries no tensor."""

    def mean(_, bucket):  # DDP reads annotations, and refuses postponed ones
        dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped = nn.parallel.DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, mean)
    return wrapped


def formulas(config: Config) -> dict[str, tuple[str, float, int, int]]:
    """Quantity to (formula, its bytes, exact bytes on rank 0, calls), from the config alone."""
    d, h, L, v, t = config.dim, config.hidden, config.layers, config.vocab, config.tp
    dp, N, T = config.dp, config.dp * config.tp, config.tokens
    B = L * (4 * d * d + 3 * d * h + 2 * d)
    P = B + 2 * v * d + d
    # (rows, elements per row) of each tensor after the tensor-parallel split, which leaves the norms whole.
    block = [(d // t, d)] * 3 + [(d, d // t)] + [(h // t, d)] * 2 + [(d, h // t)] + [(d, 1)] * 2
    blocks, root = block * L, [(v // t, d)] * 2 + [(d, 1)]
    count, largest = len(blocks + root), max([a * b for a, b in root + blocks])
    if config.layout in ("ddp", "zero1"):
        whole = ("4 P: fp32, whole", 4 * P, 4 * P, 0)
        rows = {"parameters": whole, "gradients": whole}
        rows["optimizer"] = ("8 P: two fp32 moments, whole", 8 * P, 8 * P + 4 * count, 0)
        rows["all-reduce"] = ("4 P: the fp32 gradients", 4 * P, 4 * P, 1)
        if config.layout == "zero1":  # exact where there are more ranks than tensors: one tensor each
            rows["optimizer"] = ("8 P / N: two fp32 moments, split", 8 * P / N, 8 * largest + 4, 0)
            rows["broadcast"] = ("4 P: new fp32 weights, each from its owner", 4 * P, 4 * P, count)
        return rows
    # FSDP splits whole rows, rounded up: what rank 0 has of the blocks and of the rest.
    inner, outer = (sum([math.ceil(rows / dp) * rest for rows, rest in part]) for part in (blocks, root))
    part, again = inner + outer, int(config.layout != "zero2")
    twice = "2 (P + B) / tp: bf16 weights of a tp part, forward; the blocks' again backward"
    once = "2 P / tp: bf16 weights of a tp part, forward; kept until backward"
    gathered = (2 * (P + again * B) / t, 2 * dp * (part + again * inner), L + 1 + again * L)
    share = ("4 P / N: fp32, split", 4 * P / N, 4 * part, 0)
    rows = {"parameters": share, "gradients": share}
    rows["optimizer"] = ("8 P / N: two fp32 moments, split", 8 * P / N, 8 * part + 4 * count, 0)
    rows["all-gather"] = (twice if again else once, *gathered)
    rows["reduce-scatter"] = ("4 P / tp: fp32 gradients of a tp part", 4 * P / t, 4 * dp * part, L + 1)
    if t > 1:  # exact: and the loss over split logits reduces maximum, sum and picked value, fp32
        text = "(4 L + 2) 2 T d: bf16 activations, 2 forward and 2 backward a block, embedding, head"
        sums = (4 * L + 2) * 2 * T * d
        rows["all-reduce"] = (text, sums, sums + 3 * 4 * T, 4 * L + 2 + 3)
    return rows


CASES = [Config(), *[Config(layout, 1024, 1) for layout in ("zero3", "zero2", "zero1", "ddp")]]
TEXT = """By torch's fake process group and fake tensors: nothing is allocated or sent, so there are no times.

- Bytes held: rank 0's tensors after the step; no activations, gathered weights or buffers of messages.
- Bytes of collectives: the payload, that is the whole tensor (gathered; before it is scattered; reduced).
- A ring sends, computed from the payload: k (G - 1) / G of it in a group of G; k = 2 for all-reduce, else 1.
- P parameters, B of them in L blocks, N = dp x tp ranks, T = 2048 tokens of one sequence per rank, width d.
- tp x fsdp, zero3 and zero2 hold fp32, compute in bf16, reduce in fp32; ddp and zero1 are fp32.
- "exact" adds, from the config alone, what the formula leaves out. FSDP splits whole rows: of 11008 / tp rows
  over dp rank 0 has 11, not 10.75; of 32000 / tp it has 32, not 31.25; the last ranks have none, and messages
  are padded to rank 0's size. This is the 1.1 %. Tensor parallelism leaves the 65 norms whole, AdamW counts
  steps in an fp32 scalar per tensor (291), the loss over split logits reduces 3 more fp32 values per token.
- zero1 is torch's ZeroRedundancyOptimizer, which keeps tensors whole: rank 0 has the moments of a matrix of
  131 M, 733 ranks have none, 8 P / N is only the mean. Its broadcasts come on top of DDP's all-reduce.
- DDP's one all-reduce is that of its first step; from the second on torch makes buckets of 25 MB.
- {seconds:.0f} s on one thread and {peak:.2f} GiB at most, all five layouts together."""


def compare(config: Config, found: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The table of one layout: measured, the closed formula, the exact one."""
    rows = []
    for what, (text, closed, exact, expected) in formulas(config).items():
        size, calls, ring = found["bytes"][what], found["calls"].get(what), found["ring"].get(what, 0)
        row = [what, f"{calls} ({expected})" if expected else "", f"{size:,}", text, f"{closed:,.0f}"]
        row += [f"{size / closed:.4f}", f"{exact:,}", f"{size / exact:.6f}", f"{ring:,}" if expected else ""]
        rows.append(row)
    head = ["what", "calls (due)", "bytes", "formula", "its bytes", "ratio", "exact", "ratio", "ring sends"]
    return table(f"{config.layout}: dp {config.dp} x tp {config.tp}, rank 0", head, rows)


def overview(results: list[tuple[Config, dict[str, dict[str, int]]]], text: str) -> dict[str, Any]:
    """One line per layout; for the summary, the largest distance from exact."""
    rows, off = [], 0.0
    for config, found in results:
        sizes = [found["bytes"][what] / MIB for what in ("parameters", "gradients", "optimizer")]
        sizes += [sum(sizes), sum(found["ring"].values()) / MIB]
        rows.append([f"{config.layout}, {config.dp} x {config.tp}", *[f"{size:,.1f}" for size in sizes]])
        off = max(off, *[abs(found["bytes"][w] / row[2] - 1) for w, row in formulas(config).items()])
    count = formulas(Config("ddp"))["parameters"][2] // 4
    head = ["layout, dp x tp", "parameters MiB", "gradients", "optimizer", "together", "rings send a step"]
    item = table(f"One of 1,024 ranks, simulated: {count:,} parameters", head, rows, text)
    summarise(item, "7B on 1,024 simulated ranks, bytes off exact", {"ours": f"{off:.2%}"}, "0", "0 %")
    return item


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write a results file")
    parser.add_argument(
        "--control", action="store_true", help="what the call check costs at thousands of ranks"
    )
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="real ranks: what grows in them")
    parser.add_argument("--ranks", type=int, default=48, help="ranks of --soak")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.control or options.soak:
        import control_scale

        control_scale.soak(options.soak, options.ranks) if options.soak else control_scale.main()
        return
    begin = time.perf_counter()
    results = [(config, simulate(config)) for config in CASES]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB
    text = TEXT.format(seconds=time.perf_counter() - begin, peak=peak)
    tables = [overview(results, text), *[compare(*result) for result in results]]
    show_and_write(tables, options.out)


if __name__ == "__main__":
    main()
