"""Context of `fabric.profile`: torch's profiler on each rank, one trace per rank, and a table of phases.

Loaded when used. Outside of the context nothing is marked, and no verb costs more than without it.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.profiler import profile, record_function, schedule

from fabric.core.compile import uncompiled
from fabric.core.errors import ConfigurationError
from fabric.data.loader import _FabricDataLoader
from fabric.profile._torch import compiled_module
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.wrappers import _FabricModule, _FabricOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabric.core.types import PathLike

_END = object()
# How the names of their rows in a trace begin. Loaders' own, optimizers' and messages' are torch's.
PHASES = {
    "data": ("fabric.data", "enumerate(DataLoader)#"),
    "forward": ("fabric.forward", "Torch-Compiled Region"),
    "backward": ("fabric.backward",),
    "communication": ("gloo:", "nccl:", "ncclDevKernel", "mpi:", "ucc:", "xccl:"),
    "step": ("fabric.step", "Optimizer.step#"),
}
_STEP = "ProfilerStep#"


class Profile:
    """The profiler of one rank.

    `step()` ends a step of the loop: call it once per step, on all ranks. `profiler` is torch's; None on
    ranks that record nothing.
    """

    def __init__(self, profiler: profile | None) -> None:
        self.profiler = profiler
        self.step: Callable[[], None] = _nothing if profiler is None else profiler.step


@contextmanager
def profiled(
    fabric: Any, folder: PathLike, ranks: list[int] | None, window: dict[str, int], settings: dict[str, Any]
) -> Iterator[Profile]:
    """The context of `Fabric.profile`, for which see there."""
    strategy, world = fabric.strategy, fabric.world_size
    chosen = range(world) if ranks is None else ranks
    if min(window.values()) < 0 or not window["active"] or not chosen or not {*chosen} <= {*range(world)}:
        text = ", ".join([f"{name}={value}" for name, value in {"ranks": ranks, **window}.items()])
        text += f". Give steps of 0 or more, active=1 or more, and ranks of 0 to {world - 1}."
        strategy.abort_call("profile", ConfigurationError(f"fabric.profile: {text}"))
    strategy.check_barrier("profile", f"{window}, ranks {ranks}")
    file = Path(folder) / f"rank_{fabric.global_rank}.json"
    found: dict[str, float] = {}
    if fabric.global_rank in chosen:
        file.parent.mkdir(parents=True, exist_ok=True)
        plan = schedule(**window, repeat=1)
        settings.setdefault("acc_events", True)  # one cycle: without it torch 2.11 warns that events are lost
        with (
            marked(fabric),
            profile(schedule=plan, on_trace_ready=_written(file, found), **settings) as inner,
        ):
            yield Profile(inner)
    else:
        yield Profile(None)
    told = strategy.all_gather_object(found, label="profile")
    rows = {rank: times for rank, times in enumerate(told) if times}
    if not rows:
        rank_zero_warn(
            "fabric.profile has recorded nothing: it skips wait + warmup = "
            f"{window['wait'] + window['warmup']} steps. Call prof.step() at the end of each step of the "
            "loop, more often than that."
        )
    elif fabric.is_global_zero:
        print(table(rows, file.parent), flush=True)


def _written(file: Path, found: dict[str, float]) -> Callable[[profile], None]:
    """Return the callback for the end of the window: it writes the trace and adds up its phases."""

    def write(inner: profile) -> None:
        inner.export_chrome_trace(str(file))
        found.update(times_of(json.loads(file.read_text())["traceEvents"]))

    return write


@contextmanager
def marked(fabric: Any) -> Iterator[None]:
    """Context in which models, optimizers and loaders of this process, and `fabric`, make rows of a trace."""
    with ExitStack() as undo:
        for owner, name, label in (
            (_FabricModule, "__call__", "forward"),
            (_FabricOptimizer, "step", "step"),
            (fabric, "backward", "backward"),
        ):
            marker = _recorded(getattr(owner, name), f"fabric.{label}")
            undo.enter_context(mock.patch.object(owner, name, marker))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
            kind: Any = compiled_module()
            marker = _compiled_recorded(kind.__call__)
            undo.enter_context(mock.patch.object(kind, "__call__", marker))
        drawn = _drawn(_FabricDataLoader.__iter__)
        undo.enter_context(mock.patch.object(_FabricDataLoader, "__iter__", drawn))
        yield


def _recorded(call: Callable[..., Any], label: str) -> Callable[..., Any]:
    @wraps(call)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        with record_function(label):
            return call(*args, **kwargs)

    return recorded


def _compiled_recorded(call: Callable[..., Any]) -> Callable[..., Any]:
    """`OptimizedModule.__call__` that makes the row of the forward itself.

    The class of the model has no marker meanwhile: torch 2.15 compiles again if a class gets a `__call__`.
    """

    @wraps(call)
    def recorded(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        marker = vars(_FabricModule).get("__call__")
        if marker is None or not isinstance(uncompiled(compiled), _FabricModule):
            return call(compiled, *args, **kwargs)
        del _FabricModule.__call__
        try:
            with record_function("fabric.forward"):
                return call(compiled, *args, **kwargs)
        finally:
            _FabricModule.__call__ = marker  # type: ignore[method-assign]

    # Not compiled itself: in torch 2.9 compiled graphs are OptimizedModules, too, called in compiled code.
    eager: Callable[..., Any] = torch.compiler.disable(recorded, recursive=False)
    return eager


def _drawn(begin: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @wraps(begin)
    def drawn(loader: Any) -> Iterator[Any]:
        batches = begin(loader)
        while True:
            with record_function("fabric.data"):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    return drawn


def times_of(events: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds per step of each phase of a trace, and how many steps there are; empty: none.

    Where rows of one phase overlap, time counts once.
    """
    rows = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"]
    steps = [(begin, end) for name, begin, end in rows if name.startswith(_STEP)]
    if not steps:
        return {}
    spans = {
        phase: [(begin, end) for name, begin, end in rows if name.startswith(prefixes)]
        for phase, prefixes in PHASES.items()
    }
    times = {phase: _covered(each) for phase, each in spans.items()}
    times["whole step"] = _covered(steps)
    waiting = spans["communication"]
    times["but for communication"] = _covered([*steps, *waiting]) - _covered(waiting)
    return {"steps": len(steps), **{name: time / len(steps) / 1000 for name, time in times.items()}}


def _covered(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def table(rows: dict[int, dict[str, float]], folder: Path) -> str:
    """Milliseconds per step of each phase, over ranks, and which rank was the slowest in it."""
    first = next(iter(rows.values()))
    lines = [
        f"{folder}/rank_*.json: {first['steps']} steps of {len(rows)} ranks, milliseconds per step",
        f"{'':22}{'mean':>9}{'slowest':>9}  rank",
    ]
    slowest = 0
    for name in [name for name in first if name != "steps"]:
        each = {rank: times[name] for rank, times in rows.items()}
        slowest = max(each, key=lambda rank: each[rank])
        lines.append(f"{name:22}{sum(each.values()) / len(each):9.2f}{each[slowest]:9.2f}  {slowest}")
    return "\n".join([*lines, f"The others wait for rank {slowest}."] if len(rows) > 1 else lines)


def _nothing() -> None:
    """`step` on ranks that record nothing."""
