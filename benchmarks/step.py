"""One training step of Linear(8, 8): what each engine adds to the raw loop, whole and by part. One thread."""

from __future__ import annotations

import sys
import time
import warnings
from statistics import fmean
from types import FunctionType
from typing import TYPE_CHECKING, Any

from harness import added, as_text, child, installed, interleave, report, show, summarise, timing_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Samples, Table

COPIES = 4
"""Models per engine: where a model's memory lies makes +-2 us."""
PARTS = ("forward", "backward", "optimizer step", "zero_grad")
PRECISIONS = {"32-true": "no", "bf16-mixed": "bf16"}
"""Ours and Lightning's name of a precision, and Accelerate's."""


def main() -> None:
    import torch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    show([item for device in devices for precision in PRECISIONS for item in compare(precision, device)])


def compare(precision: str, device: str) -> list[Table]:
    """The tables of one precision and device, each engine measured against raw in a process of its own.

    In one process they would slow each other: the interpreter specialises torch's own code for the types that
    pass through it, and Accelerate keeps its precision in a process-wide object.
    """
    engines = ["ours", *(["Lightning Fabric"] * installed("lightning"))]
    engines += ["Accelerate"] * installed("accelerate")
    found = {e: child([__file__, precision, device, e], OMP_NUM_THREADS="1") for e in engines}
    target = "+3" if precision == "32-true" else "+8"
    title, tables = f"Step of Linear(8, 8), {precision}, {device}", []
    for part in ("whole", *PARTS):
        per_engine = [timing_table(f"{title}: {part}", found[e][part], "raw", 1e-6, "us") for e in engines]
        tables.append(per_engine[0])
        for other in per_engine[1:]:  # without their own rows of raw
            tables[-1]["rows"] += other["rows"][2:]
    tables[0]["note"] = "Each engine in a process of its own; raw is the one beside ours."
    values = {e: added(found[e]["whole"], "raw")[e] for e in engines}
    values["raw again"] = added(found["ours"]["whole"], "raw")["raw again"]
    text = as_text(values, "{:+.1f} us", 1e6)
    limit = f"{text['raw again']} (raw again)"
    summarise(tables[0], f"one step of Linear(8, 8), {precision}, {device}", text, limit, f"<= {target} us")
    return tables


def measure(precision: str, device: str, engine: str) -> None:
    """Time the whole step and its parts of raw and of one engine in this process, and report the samples."""
    import torch

    torch.set_num_threads(1)
    # All of a CPU step runs in this thread; its own clock does not count what other processes take.
    clock = time.thread_time if device == "cpu" else time.perf_counter
    warnings.simplefilter("ignore")
    x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    make = {"ours": ours, "Lightning Fabric": lightning, "Accelerate": accelerate}[engine]
    makers = {"raw": raw, "raw again": raw, engine: make}
    loops = {f"{name}#{n}": f(precision, device) for n in range(COPIES) for name, f in makers.items()}
    whole = {name: step_of(x, y, *loop) for name, loop in loops.items()}
    found = {"whole": joined(interleave(whole, 300, 20, 20, clock))}
    parts = {name: parts_of(x, y, *loop) for name, loop in loops.items()}
    for part in PARTS:
        calls = {name: parts[name][part] for name in loops}
        found[part] = joined(interleave(calls, 80, 50, 10, clock))
    report(found)


def joined(samples: Samples) -> Samples:
    """The mean over copies ("ours#0", "ours#1", ...), round by round."""
    copies: dict[str, list[list[float]]] = {}
    for name, times in samples.items():
        copies.setdefault(name.partition("#")[0], []).append(times)
    return {name: [fmean(some) for some in zip(*times, strict=True)] for name, times in copies.items()}


Loop = tuple[Any, Any, "Callable[[Any], None]"]
"""A model, an optimizer and what runs the backward pass."""


def fresh(device: str) -> tuple[Any, Any]:
    """A model and its optimizer."""
    import torch

    model = torch.nn.Linear(8, 8).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def raw(precision: str, device: str) -> Loop:
    """Torch alone; bf16 by autocast around the forward and a cast of its output, as the engines do."""
    import torch

    model, optimizer = fresh(device)

    def forward(x: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return model(x)

    return (model if precision == "32-true" else forward), optimizer, torch.Tensor.backward


def ours(precision: str, device: str) -> Loop:
    """This package."""
    from fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1, precision=precision)
    return *fabric.setup(*fresh(device)), fabric.backward


def lightning(precision: str, device: str) -> Loop:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1, precision=precision)
    return *fabric.setup(*fresh(device)), fabric.backward


def accelerate(precision: str, device: str) -> Loop:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=PRECISIONS[precision])
    return *accelerator.prepare(*fresh(device)), accelerator.backward


def step_of(
    x: Any, y: Any, model: Any, optimizer: Any, backward: Callable[[Any], None]
) -> Callable[[], None]:
    """One whole training step."""
    import torch

    loss_of = torch.nn.functional.mse_loss

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model(x).float(), y)
        backward(loss)
        optimizer.step()

    return own_code(step)


def own_code(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function with bytecode of its own.

    The interpreter specialises code for the types that it meets; cases that shared one code object would undo
    each other's specialisation, as no user's loop does.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_")
    return FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)


def parts_of(
    x: Any, y: Any, model: Any, optimizer: Any, backward: Callable[[Any], None]
) -> dict[str, Callable[[], Any]]:
    """The parts of a step, each repeatable by itself."""
    import torch

    weight = torch.zeros((), device=x.device, requires_grad=True)
    loss = weight * 2
    backward(torch.nn.functional.mse_loss(model(x).float(), y))  # so that the step has gradients
    parts = {
        "forward": lambda: model(x),
        "backward": lambda: backward(loss, retain_graph=True),  # type: ignore[call-arg]
        "optimizer step": lambda: optimizer.step(),  # noqa: PLW0108 - with a code object of its own
        "zero_grad": lambda: optimizer.zero_grad(set_to_none=False),
    }
    return {name: own_code(call) for name, call in parts.items()}


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure(*sys.argv[1:])
    else:
        main()
