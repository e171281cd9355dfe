"""One training step of Linear(8, 8): what each engine adds to the raw loop, whole and by part. One thread."""

from __future__ import annotations

import sys
import time
import warnings
from types import FunctionType
from typing import TYPE_CHECKING, Any

from harness import added, as_text, child, installed, interleave, report, show, summarise, timing_table

if TYPE_CHECKING:
    from collections.abc import Callable

PRECISIONS = {"32-true": "no", "bf16-mixed": "bf16"}
"""Ours and Lightning's name of a precision, and Accelerate's."""


def main() -> None:
    import torch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    tables = []
    for device in devices:
        for precision in PRECISIONS:
            # One process each: Accelerate keeps its precision in a process-wide object.
            tables += child([__file__, precision, device], OMP_NUM_THREADS="1")
    show(tables)


def measure(precision: str, device: str) -> None:
    """Time the whole step and its parts in this process, and report two tables."""
    import torch

    torch.set_num_threads(1)
    # All of a CPU step runs in this thread; its own clock does not count what other processes take.
    clock = time.thread_time if device == "cpu" else time.perf_counter
    warnings.simplefilter("ignore")
    x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    loops = {
        "raw": raw(precision, device),
        "raw again": raw(precision, device),
        "ours": ours(precision, device),
    }
    if installed("lightning"):
        loops["Lightning Fabric"] = lightning(precision, device)
    if installed("accelerate"):
        loops["Accelerate"] = accelerate(precision, device)
    whole, parts = {}, {}
    for name, loop in loops.items():
        whole[name] = step_of(x, y, *loop)
        parts |= {f"{part}, {name}": call for part, call in parts_of(x, y, *loop).items()}
    target = "+3" if precision == "32-true" else "+8"
    title = f"Step of Linear(8, 8), {precision}, {device}"
    steps = interleave(whole, 600, 20, 20, clock)
    tables = [timing_table(f"{title}, target <= {target} us", steps, "raw", 1e-6, "us")]
    values = as_text(added(steps, "raw"), "{:+.1f} us", 1e6)
    limit = f"{values['raw again']} (raw again)"
    summarise(tables[0], f"one step of Linear(8, 8), {precision}, {device}", values, limit, f"<= {target} us")
    samples = interleave(parts, 300, 50, 20, clock)
    for part in ("forward", "backward", "optimizer step", "zero_grad"):
        some = {name.partition(", ")[2]: times for name, times in samples.items() if name.startswith(part)}
        tables.append(timing_table(f"{title}: {part}", some, "raw", 1e-6, "us"))
    report(tables)


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
    if len(sys.argv) == 3:
        measure(*sys.argv[1:])
    else:
        main()
