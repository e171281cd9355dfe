"""What `fabric.profile` gives: torch's profiler on each rank, one trace per rank, and a table of phases.

Loaded when used. Outside of the context nothing is marked, and no verb costs more than without it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.profiler import profile, record_function, schedule

from fabric.core.errors import ConfigurationError
from fabric.data.loader import _FabricDataLoader
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


class Times(NamedTuple):
    """What one rank has recorded: steps, and microseconds of them by phase."""

    steps: int
    whole: float
    phases: dict[str, float]
    busy: float
    """Of the steps, without what was spent in communication."""


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
        strategy.refuse("profile", ConfigurationError(f"fabric.profile: {text}"))
    strategy.meet("profile", f"{window}, ranks {ranks}")
    file = Path(folder) / f"rank_{fabric.global_rank}.json"
    found: list[Times] = []
    if fabric.global_rank in chosen:
        file.parent.mkdir(parents=True, exist_ok=True)
        plan = schedule(**window, repeat=1)
        with (
            marked(fabric),
            profile(schedule=plan, on_trace_ready=_written(file, found), **settings) as inner,
        ):
            yield Profile(inner)
    else:
        yield Profile(None)
    told = strategy.all_gather_object(found, label="profile")
    rows = {rank: times[0] for rank, times in enumerate(told) if times}
    if not rows:
        rank_zero_warn(
            "fabric.profile has recorded nothing: it skips wait + warmup = "
            f"{window['wait'] + window['warmup']} steps. Call prof.step() at the end of each step of the "
            "loop, more often than that."
        )
    elif fabric.is_global_zero:
        print(table(rows, file.parent), flush=True)


def _written(file: Path, found: list[Times]) -> Callable[[profile], None]:
    """What torch calls at the end of the window: writes the trace and adds up its phases."""

    def write(inner: profile) -> None:
        inner.export_chrome_trace(str(file))
        times = times_of(json.loads(file.read_text())["traceEvents"])
        if times is not None:
            found.append(times)

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
            _put(undo, owner, name, _recorded(getattr(owner, name), f"fabric.{label}"))
        _put(undo, _FabricDataLoader, "__iter__", _drawn(_FabricDataLoader.__iter__))
        yield


def _put(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _recorded(call: Callable[..., Any], label: str) -> Callable[..., Any]:
    @wraps(call)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        with record_function(label):
            return call(*args, **kwargs)

    return recorded


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


def times_of(events: list[dict[str, Any]]) -> Times | None:
    """Add up the rows of a trace; where rows of one phase overlap, time counts once. None: no steps."""
    rows = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"]
    steps = [(begin, end) for name, begin, end in rows if name.startswith(_STEP)]
    if not steps:
        return None
    spans = {
        phase: [(begin, end) for name, begin, end in rows if name.startswith(prefixes)]
        for phase, prefixes in PHASES.items()
    }
    whole = _covered(steps)
    apart = _covered([*steps, *spans["communication"]]) - _covered(spans["communication"])
    return Times(len(steps), whole, {phase: _covered(each) for phase, each in spans.items()}, apart)


def _covered(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def table(rows: dict[int, Times], folder: Path) -> str:
    """Milliseconds per step of each phase, over ranks, and which rank was the slowest in it."""
    kinds: list[tuple[str, Callable[[Times], float]]] = [
        *[(phase, lambda times, phase=phase: times.phases[phase]) for phase in PHASES],
        ("whole step", lambda times: times.whole),
        ("but for communication", lambda times: times.busy),
    ]
    lines = [
        f"{folder}/rank_*.json: {rows[min(rows)].steps} steps of {len(rows)} ranks, milliseconds per step"
    ]
    lines.append(f"{'':22}{'mean':>9}{'slowest':>9}  rank")
    for name, value in kinds:
        each = {rank: value(times) / times.steps / 1000 for rank, times in rows.items()}
        slowest = max(each, key=lambda rank: each[rank])
        lines.append(f"{name:22}{sum(each.values()) / len(each):9.2f}{each[slowest]:9.2f}  {slowest}")
    lines.append(f"The others wait for rank {slowest}." if len(rows) > 1 else "")
    return "\n".join(filter(None, lines))


def _nothing() -> None:
    """`step` on ranks that record nothing."""
