"""Timed versions of calls of Fabric and of waits of torch.distributed, which replace them while a report is
recorded. In other threads than the recorded one, and while torch compiles, they only make the call.
"""

from __future__ import annotations

import threading
import warnings
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.collectives.channel import Channel
from fabric.data.loader import _FabricDataLoader
from fabric.fabric import Fabric
from fabric.report.format import KINDS
from fabric.wrappers import _FabricOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable

_, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, VERBS, CHECKPOINT = range(len(KINDS))
_VERBS = (
    "agree", "all", "all_gather", "all_gather_object", "all_reduce", "all_to_all", "any", "barrier",
    "broadcast", "check_replicas", "clip_gradients", "compute_metrics", "find_batch_size", "gather",
    "normalize_gradients", "reduce_scatter", "scatter",
)  # fmt: skip
_SAVES = {"save": "save", "save_latest": "save", "load": "load", "load_raw": "load", "load_latest": "load"}


class _TimedProcess:
    """The part that records this process, of the `Fabric` that was launched last; None: no report."""

    part: Any = None


timed_process = _TimedProcess()


def recorder_here() -> Any:
    """Return the recorder, or None if this is not the thread that it records."""
    recorder = None if timed_process.part is None else timed_process.part.recorder
    return recorder if recorder is not None and threading.get_ident() == recorder.thread else None


def _run(kind: int, call: Callable[..., Any], done: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or (recorder := recorder_here()) is None:
        return call(*args, **kwargs)
    previous, result, ok = recorder.switch(kind), None, False
    begin = recorder.since
    try:
        result = call(*args, **kwargs)
        ok = True
        return result
    finally:
        recorder.switch(previous)
        if done is not None:
            done(recorder, ok, result, recorder.since - begin, *args, **kwargs)


def timed(kind: int, done: Callable[..., Any] | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, with its seconds added to `kind`.

    `done(recorder, whether it succeeded, its result, its seconds, *args, **kwargs)` is called after it.
    """

    @wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _run(kind, call, done, args, kwargs)

    return wrapper


class TimedForward:
    """The forward of a set-up model. A class, since models are copied and pickled with it."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, and count its seconds, in one step also its floating-point operations."""
        call = self.call
        if not torch.compiler.is_compiling() and (flops := getattr(recorder_here(), "flops", None)):
            call = partial(flops.run, call) if torch.is_grad_enabled() else call  # no evaluation
        return _run(FORWARD, call, None, args, kwargs)


def replacements() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return (owner, name, function that makes the timed version) of all calls."""
    waits: list[tuple[Any, str]] = [(Channel, "check_call")]
    if dist.is_available():
        waits.append((dist.Work, "wait"))
    return [
        *[(owner, name, partial(timed, COMMUNICATION, None)) for owner, name in waits],
        *[(Fabric, name, partial(timed, VERBS, None)) for name in _VERBS],
        *[(Fabric, name, partial(timed, CHECKPOINT, partial(_saved, kind))) for name, kind in _SAVES.items()],
        (Fabric, "backward", partial(timed, BACKWARD, None)),
        (Fabric, "log_dict", partial(timed, VERBS, _logged)),
        (Fabric, "should_stop", partial(timed, VERBS, _stop_checked)),
        (_FabricOptimizer, "step", partial(timed, OPTIMIZER, _stepped)),
        (_FabricDataLoader, "__iter__", _iterating),
        (warnings, "showwarning", _warning),
    ]


def _stepped(recorder: Any, ok: bool, _: Any, seconds: float, view: Any, *args: Any, **kwargs: Any) -> None:
    if ok:
        recorder.stepped(view.optimizer)


def _saved(
    kind: str,
    recorder: Any,
    ok: bool,
    _: Any,
    seconds: float,
    fabric: Any,
    path: Any = None,
    *args: Any,
    **kw: Any,
) -> None:
    recorder.event(kind, path=str(path or kw.get("directory")), seconds=seconds, ok=ok)


def _logged(
    recorder: Any,
    ok: bool,
    values: Any,
    seconds: float,
    fabric: Any,
    metrics: Any,
    step: Any = None,
    **kw: Any,
) -> None:
    if ok and fabric.is_global_zero:
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        recorder.event("log", values=numbers, logged_step=step)


def _stop_checked(recorder: Any, ok: bool, _: Any, seconds: float, fabric: Any) -> None:
    if ok and fabric._stopper.reason is not None:
        recorder.event_once("signal", name=fabric._stopper.reason)


def compared(recorder: Any, ok: bool, _: Any, seconds: float, label: str, **kwargs: Any) -> None:
    """Record a comparison of replicas."""
    recorder.event("check", what=label, ok=ok)


def _iterating(begin: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(begin)
    def wrapper(loader: Any) -> Any:
        recorder = recorder_here()
        return begin(loader) if recorder is None else recorder.batches(begin, loader)

    return wrapper


def _warning(show: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(show)
    def wrapper(message: Any, category: Any, filename: str, lineno: int, *args: Any, **kwargs: Any) -> None:
        if (part := timed_process.part) is not None:
            place = f"{filename.rpartition('/')[2]}:{lineno}"
            part.recorder.event_once("warning", text=str(message)[:500], place=place)
        show(message, category, filename, lineno, *args, **kwargs)

    return wrapper
