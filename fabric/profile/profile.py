"""The context of `fabric.profile`: torch's profiler on each rank, one trace per rank, and a table of phases.

Imported on first use. Outside of the context nothing is recorded, so that verbs have no overhead.
"""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import ExitStack, contextmanager
from functools import wraps
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.profiler import profile, record_function, schedule

from fabric.collectives.channel import Channel
from fabric.core.backward_listeners import add_backward_listener
from fabric.core.compile import uncompiled
from fabric.core.errors import ArgumentTypeError, ConfigurationError, FabricError, UsageError
from fabric.data.loader import _FabricDataLoader
from fabric.profile._torch import compiled_module
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.wrappers import _FabricModule, _FabricOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabric.core.types import PathLike

_END = object()
_is_active = False
"""Whether this process is in the context. A second profiler of torch ends the process by SIGSEGV."""
# By phase, the prefixes of event names in a trace: those of Fabric, and torch's own.
PHASES = {
    "data": ("fabric.data", "enumerate(DataLoader)#"),
    "forward": ("fabric.forward", "Torch-Compiled Region"),
    "backward": ("fabric.backward",),
    "communication": ("fabric.wait", "gloo:", "nccl:", "ncclDevKernel", "mpi:", "ucc:", "xccl:"),
    "step": ("fabric.step", "Optimizer.step#"),
}
_STEP = "ProfilerStep#"
_SET_HERE = ("schedule", "on_trace_ready")
"""Arguments of torch's profiler that are not settings."""


class Profile:
    """The profiler of one rank.

    `step()` ends a step of the loop: call it once per step, on all ranks. `profiler` is torch's; None on
    ranks without recording.
    """

    def __init__(self, profiler: profile | None) -> None:
        self.profiler = profiler
        self.step: Callable[[], None] = _nothing if profiler is None else profiler.step


@contextmanager
def profiled(
    fabric: Any, folder: PathLike, ranks: list[int] | None, window: dict[str, int], settings: dict[str, Any]
) -> Iterator[Profile]:
    """Context of `Fabric.profile`, which documents the arguments."""
    global _is_active
    strategy, world = fabric.strategy, fabric.world_size
    chosen = range(world) if ranks is None else ranks
    try:
        if _is_active:
            raise UsageError(
                "fabric.profile is active already, and torch has one profiler. Remove one of the two."
            )
        _check_settings(settings, window)
        _check_window(window, ranks, world)
    except FabricError as error:
        strategy.abort_call("profile", error)
    strategy.check_barrier("profile", f"{window}, ranks {ranks}")
    file = Path(folder) / f"rank_{fabric.global_rank}.json"
    times: dict[str, float] = {}
    _is_active = True
    try:
        if fabric.global_rank in chosen:
            file.parent.mkdir(parents=True, exist_ok=True)
            plan = schedule(**window, repeat=1)
            settings.setdefault("acc_events", True)  # else torch 2.11 warns that events are lost
            with (
                recording_phases(),
                profile(
                    schedule=plan, on_trace_ready=_trace_writer(file, times, window), **settings
                ) as profiler,
            ):
                yield Profile(profiler)
        else:
            yield Profile(None)
    finally:
        _is_active = False
    gathered = strategy.all_gather_object(times, label="profile")
    rows = {rank: times for rank, times in enumerate(gathered) if times}
    if not rows:
        rank_zero_warn(
            "fabric.profile has recorded nothing: there were no more than wait + warmup = "
            f"{window['wait'] + window['warmup']} steps, which are not recorded. Call prof.step() at the end "
            "of each step of the loop, and run more steps."
        )
    elif fabric.is_global_zero:
        print(table(rows, file.parent), flush=True)


def _check_settings(settings: dict[str, Any], window: dict[str, int]) -> None:
    """Raise ArgumentTypeError for an argument that torch's profiler does not take, or that Fabric sets."""
    known = [name for name in inspect.signature(profile).parameters if name not in _SET_HERE]
    for name in settings:
        if name not in known:
            from fabric.core.advice import unknown_argument

            raise ArgumentTypeError(unknown_argument("fabric.profile", name, ["ranks", *window, *known]))


def _check_window(window: dict[str, Any], ranks: Any, world: int) -> None:
    """Raise ConfigurationError unless the numbers of steps, and the ranks that record, are possible."""
    is_window = all([isinstance(number, int) and number >= 0 for number in window.values()])
    is_list = isinstance(ranks, list | tuple | set | range) and bool(ranks)
    is_choice = ranks is None or (is_list and {*ranks} <= {*range(world)})
    if not is_window or not window["active"] or not is_choice:
        text = ", ".join([f"{name}={value}" for name, value in {"ranks": ranks, **window}.items()])
        raise ConfigurationError(
            f"fabric.profile: {text}. Give steps of 0 or more, active=1 or more, and a list of ranks of "
            f"0 to {world - 1}."
        )


def _trace_writer(file: Path, times: dict[str, float], window: dict[str, int]) -> Callable[[profile], None]:
    """Return the callback for the end of the window: it writes the trace and computes times of phases."""

    def write(profiler: profile) -> None:
        # A loop that ended inside the window has begun one more step. Without `step()` all is one step.
        ended = profiler.step_num - window["wait"] - window["warmup"] if profiler.step_num else 1
        profiler.export_chrome_trace(str(file))
        times.update(times_of(json.loads(file.read_text())["traceEvents"], ended))
        if not times:
            file.unlink()

    return write


@contextmanager
def recording_phases() -> Iterator[None]:
    """Context in which models, optimizers, loaders, backwards and waits record trace events."""
    listener = _BackwardListener()  # referenced weakly
    add_backward_listener(listener)
    with ExitStack() as patches:
        for owner, name, label in (
            (_FabricModule, "__call__", "forward"),
            (_FabricOptimizer, "step", "step"),
            (Channel, "check_call", "wait"),  # a rank that is early waits here, before the collective
        ):
            marker = _recording(getattr(owner, name), f"fabric.{label}")
            patches.enter_context(mock.patch.object(owner, name, marker))
        if "torch._dynamo" in sys.modules:  # only if it is imported, which takes seconds
            kind: Any = compiled_module()
            marker = _recording_compiled(kind.__call__)
            patches.enter_context(mock.patch.object(kind, "__call__", marker))
        wrapper = _recording_data_loading(_FabricDataLoader.__iter__)
        patches.enter_context(mock.patch.object(_FabricDataLoader, "__iter__", wrapper))
        yield


class _BackwardListener:
    """Records the backwards of this process, plain `loss.backward()` among them."""

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run an outermost backward pass."""
        with record_function("fabric.backward"):
            run(tensors, *args, **kwargs)

    def after_nested_pass(self) -> None:
        """Do nothing: the outermost pass is recorded."""


def _recording(call: Callable[..., Any], label: str) -> Callable[..., Any]:
    @wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        with record_function(label):
            return call(*args, **kwargs)

    return wrapper


def _recording_compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `OptimizedModule.__call__` that records the event of the forward.

    The class of the model is not patched during the call: torch 2.15 recompiles if a class gets a `__call__`.
    """

    @wraps(call)
    def wrapper(compiled: Any, *args: Any, **kwargs: Any) -> Any:
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
    eager: Callable[..., Any] = torch.compiler.disable(wrapper, recursive=False)
    return eager


def _recording_data_loading(begin: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @wraps(begin)
    def wrapper(loader: Any) -> Iterator[Any]:
        batches = begin(loader)
        while True:
            with record_function("fabric.data"):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    return wrapper


def times_of(events: list[dict[str, Any]], num_steps: int) -> dict[str, float]:
    """Return milliseconds per step of each phase of a trace, and the number of steps; empty: no steps.

    Overlapping events of one phase count once, and a device's copies of the host's events do not. Only the
    first `num_steps` steps count; the loop did not end the one after them.
    """
    complete = [e for e in events if e.get("ph") == "X" and e.get("cat") != "gpu_user_annotation"]
    rows = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in complete]
    begun = sorted([(begin, end) for name, begin, end in rows if name.startswith(_STEP)])
    steps = begun[:num_steps]
    if not steps:
        return {}
    last = steps[-1][1] if len(steps) < len(begun) else inf  # kernels of a device may end after the step
    spans = {
        phase: [
            (begin, min(end, last)) for name, begin, end in rows if name.startswith(prefixes) and begin < last
        ]
        for phase, prefixes in PHASES.items()
    }
    times = {phase: _covered(phase_spans) for phase, phase_spans in spans.items()}
    times["whole step"] = _covered(steps)
    communication = spans["communication"]
    times["without communication"] = _covered([*steps, *communication]) - _covered(communication)
    return {"steps": len(steps), **{name: time / len(steps) / 1000 for name, time in times.items()}}


def _covered(spans: list[tuple[float, float]]) -> float:
    total, covered_until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return total


def table(rows: dict[int, dict[str, float]], folder: Path) -> str:
    """Return the table of milliseconds per step of each phase: mean, and the slowest rank."""
    first = next(iter(rows.values()))
    lines = [
        f"{folder}/rank_*.json: {first['steps']} steps of {len(rows)} ranks, milliseconds per step",
        f"{'':22}{'mean':>9}{'slowest':>9}  rank",
    ]
    slowest = 0
    for name in [name for name in first if name != "steps"]:
        by_rank = {rank: times[name] for rank, times in rows.items()}
        slowest = max(by_rank, key=lambda rank: by_rank[rank])
        lines.append(
            f"{name:22}{sum(by_rank.values()) / len(by_rank):9.2f}{by_rank[slowest]:9.2f}  {slowest}"
        )
    return "\n".join([*lines, f"The others wait for rank {slowest}."] if len(rows) > 1 else lines)


def _nothing() -> None:
    """Do nothing: `step` on ranks without recording."""
