"""Collectives on trees, 2 ranks, against torch.distributed by hand; how many messages each engine sends."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from harness import (
    as_text,
    installed,
    interleave,
    ranks,
    ratios,
    report,
    show,
    summarise,
    table,
    timing_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT, SIZE = 100, 16
"""One hundred tensors of 16 floats, in a dictionary."""


def main() -> None:
    show(ranks([__file__, "rank"], OMP_NUM_THREADS="1"))


def measure() -> None:
    """Time and count every verb; all ranks call this."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topics = verbs(engines())
    tables, counts = [], []
    for title, (cases, rounds, inner, target) in topics.items():
        counts.append([title, *(f"{name}: {count(call)}" for name, call in cases.items())])
        samples = interleave(cases, rounds, inner, before=dist.barrier)
        unit = (1e-3, "ms") if " MB " in title else (1e-6, "us")
        base = next(iter(cases))
        tables.append(timing_table(f"{title}, target <= {target}", samples, base, *unit))
        values = as_text(ratios(samples, base), "{:.2f}")
        summarise(tables[-1], f"{title}, 2 ranks, vs {base}", values, "1", f"<= {target}")
    width = max(len(row) for row in counts)
    rows = [row + [""] * (width - len(row)) for row in counts]
    tables.append(
        table("Messages for one verb: calls of torch.distributed", ["verb"] + [""] * (width - 1), rows)
    )
    dist.barrier()
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        report(tables)


def engines() -> dict[str, Any]:
    """Each engine's object with all_reduce, all_gather and broadcast, in the process group that exists."""
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    made: dict[str, Any] = {"ours": fabric}
    if installed("lightning"):
        from lightning.fabric import Fabric as Lightning

        made["Lightning Fabric"] = Lightning(accelerator="cpu", devices=2, strategy="ddp")
        made["Lightning Fabric"].launch()
    if installed("accelerate"):
        from accelerate import Accelerator

        made["Accelerate"] = Hugging(Accelerator(cpu=True))
    return made


class Hugging:
    """Accelerate's verbs under the names of the others."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def all_reduce(self, data: Any, reduce_op: str) -> Any:
        return self.accelerator.reduce(data, reduction=reduce_op)

    def all_gather(self, data: Any) -> Any:
        return self.accelerator.gather(data)

    def broadcast(self, data: Any) -> Any:
        from accelerate.utils import broadcast

        return broadcast(data)


def verbs(made: dict[str, Any]) -> dict[str, tuple[dict[str, Callable[[], Any]], int, int, float]]:
    """Title to (cases, the raw one first; rounds; calls per round; target)."""
    import torch
    import torch.distributed as dist

    small = {f"metric{i}": torch.ones(SIZE) for i in range(COUNT)}
    one, large, huge = torch.ones(()), torch.ones(10 * 2**20 // 4), torch.zeros(64 * 2**20 // 4)
    flat, scalar = torch.ones(COUNT * SIZE), torch.ones(())

    def reduce_by_hand() -> None:
        joined = torch.cat([t.view(-1) for t in small.values()])
        dist.all_reduce(joined)
        joined /= 2
        for tensor, part in zip(small.values(), joined.split(SIZE), strict=True):
            tensor.copy_(part)

    def gather_by_hand() -> dict[str, Any]:
        joined = torch.cat([t.view(-1) for t in small.values()])
        out = joined.new_empty(2 * len(joined))
        dist.all_gather_into_tensor(out, joined)
        parts = out.view(2, -1).split(SIZE, dim=1)
        return {name: part.contiguous() for name, part in zip(small, parts, strict=True)}

    def each(call: Callable[[Any], Any]) -> dict[str, Callable[[], Any]]:
        return {name: (lambda engine=engine: call(engine)) for name, engine in made.items()}

    reduced = {
        "by hand, flattened": reduce_by_hand,
        "flat tensor, no packing": lambda: dist.all_reduce(flat),
        **each(lambda engine: engine.all_reduce(small, reduce_op="mean")),
    }
    gathered = {"by hand, flattened": gather_by_hand, **each(lambda engine: engine.all_gather(small))}
    sent = {
        "raw": lambda: dist.broadcast(large, 0),
        "raw again": lambda: dist.broadcast(large, 0),
        **each(lambda engine: engine.broadcast(large)),
    }
    single = {"raw": lambda: dist.all_reduce(scalar), **each(lambda e: e.all_reduce(one, reduce_op="sum"))}
    heavy = {
        "raw": lambda: dist.all_reduce(huge),
        "raw again": lambda: dist.all_reduce(huge),
        "ours": lambda: made["ours"].all_reduce(huge, reduce_op="sum"),
    }
    waits = {"raw": dist.barrier, **{n: e.barrier for n, e in made.items() if n != "Accelerate"}}
    return {
        f"all_reduce of {COUNT} small tensors": (reduced, 60, 5, 1.5),
        f"all_gather of {COUNT} small tensors": (gathered, 60, 5, 1.5),
        "broadcast of a 10 MB tensor": (sent, 60, 2, 1.1),
        "all_reduce of one scalar": (single, 60, 20, 1.6),
        "all_reduce of a 64 MB tensor": (heavy, 30, 1, 1.05),
        "barrier": (waits, 60, 20, 1.5),
    }


MESSAGES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast", "barrier",
            "all_gather_object", "broadcast_object_list", "reduce", "gather", "scatter")  # fmt: skip


def count(call: Callable[[], Any]) -> str:
    """How often `call` reaches each message of torch.distributed, as text; all ranks call this."""
    from collections import Counter
    from unittest import mock

    import torch.distributed as dist

    found: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return function(*args, **kwargs)

        return counted

    frames = dist.ProcessGroupGloo.allgather  # ours ask it directly

    def frame(*args: Any) -> Any:
        found["frame"] += 1
        return frames(*args)

    patched = {name: counting(name) for name in MESSAGES if hasattr(dist, name)}
    with mock.patch.multiple(dist, **patched), mock.patch.object(dist.ProcessGroupGloo, "allgather", frame):
        call()
    return " + ".join(f"{times} {name}" for name, times in found.items()) or "nothing seen"


if __name__ == "__main__":
    if os.environ.get("RANK") and sys.argv[1:] == ["rank"]:
        measure()
    else:
        main()
