"""Timed versions of calls of Fabric and of waits of torch.distributed, which replace them while a report is
recorded. All do nothing more in other threads than the recorded one, and while torch compiles.
"""

from __future__ import annotations

import threading
import time
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

    from fabric.report.recorder import Recorder

_, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, VERBS, CHECKPOINT = range(len(KINDS))
_VERBS = (
    "agree", "all", "all_gather", "all_gather_object", "all_reduce", "all_to_all", "any", "barrier",
    "broadcast", "check_replicas", "clip_gradients", "compute_metrics", "gather", "normalize_gradients",
    "reduce_scatter", "scatter",
)  # fmt: skip
_SAVES = {"save": "save", "save_latest": "save", "load": "load", "load_raw": "load", "load_latest": "load"}


class _TimedProcess:
    """The part that records this process: of the `Fabric` that was launched last; None: no report."""

    part: Any = None


timed_process = _TimedProcess()


def recorder_here() -> Recorder | None:
    """Return the recorder, if this is the thread that it records."""
    recorder: Recorder | None = None if timed_process.part is None else timed_process.part.recorder
    return recorder if recorder is not None and threading.get_ident() == recorder.thread else None


def timed(kind: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with its seconds counted to `kind`."""

    @wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (recorder := recorder_here()) is None:
            return call(*args, **kwargs)
        previous = recorder.switch(kind)
        try:
            return call(*args, **kwargs)
        finally:
            recorder.switch(previous)

    return wrapper


class TimedForward:
    """The forward of a set-up model. A class, since models are copied and pickled with it."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, and count its seconds."""
        if torch.compiler.is_compiling() or (recorder := recorder_here()) is None:
            return self.call(*args, **kwargs)
        previous = recorder.switch(FORWARD)
        try:
            return self.call(*args, **kwargs)
        finally:
            recorder.switch(previous)


def replacements() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return (owner, name, function that makes the timed version) of all calls."""
    return [
        (Fabric, "backward", partial(timed, BACKWARD)),
        (Channel, "check_call", partial(timed, COMMUNICATION)),
        *([(dist.Work, "wait", partial(timed, COMMUNICATION))] if dist.is_available() else []),
        *[(Fabric, name, partial(timed, VERBS)) for name in _VERBS],
        *[(Fabric, name, partial(_saving, kind)) for name, kind in _SAVES.items()],
        (Fabric, "log_dict", _logging),
        (Fabric, "should_stop", _stopping),
        (_FabricOptimizer, "step", _stepping),
        (_FabricDataLoader, "__iter__", _iterating),
        (warnings, "showwarning", _warning),
    ]


def _stepping(call: Callable[..., Any]) -> Callable[..., Any]:
    step = timed(OPTIMIZER, call)

    @wraps(call)
    def wrapper(view: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(view, *args, **kwargs)
        if not torch.compiler.is_compiling() and (recorder := recorder_here()) is not None:
            recorder.stepped(view.optimizer)
        return result

    return wrapper


def _iterating(begin: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(begin)
    def wrapper(loader: Any) -> Any:
        recorder = recorder_here()
        return begin(loader) if recorder is None else recorder.batches(begin, loader)

    return wrapper


def _saving(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    save = timed(CHECKPOINT, call)

    @wraps(call)
    def wrapper(fabric: Any, *args: Any, **kwargs: Any) -> Any:
        begin, ok = time.perf_counter(), False
        try:
            result = save(fabric, *args, **kwargs)
            ok = True
        finally:
            if (recorder := recorder_here()) is not None:
                path = args[0] if args else kwargs.get("path", kwargs.get("directory"))
                recorder.event(kind, path=str(path), seconds=time.perf_counter() - begin, ok=ok)
        return result

    return wrapper


def _logging(call: Callable[..., Any]) -> Callable[..., Any]:
    log = timed(VERBS, call)

    @wraps(call)
    def wrapper(fabric: Any, metrics: Any, step: int | None = None, **kwargs: Any) -> Any:
        values = log(fabric, metrics, step, **kwargs)
        if fabric.is_global_zero and (recorder := recorder_here()) is not None:
            numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
            recorder.event("log", values=numbers, **({} if step is None else {"logged_step": step}))
        return values

    return wrapper


def _stopping(call: Callable[..., Any]) -> Callable[..., Any]:
    ask, known = timed(VERBS, call), []

    @wraps(call)
    def wrapper(fabric: Any) -> Any:
        result = ask(fabric)
        reason = fabric._stopper.reason
        if reason is not None and reason not in known and (recorder := recorder_here()) is not None:
            known.append(reason)
            recorder.event("signal", name=reason)
        return result

    return wrapper


def comparing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the comparison of replicas, timed and recorded."""
    compare = timed(VERBS, call)

    @wraps(call)
    def wrapper(label: str, **kwargs: Any) -> None:
        ok = False
        try:
            compare(label, **kwargs)
            ok = True
        finally:
            if (recorder := recorder_here()) is not None:
                recorder.event("check", what=label, ok=ok)

    return wrapper


def _warning(show: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(show)
    def wrapper(message: Any, category: Any, filename: str, lineno: int, *args: Any, **kwargs: Any) -> None:
        part = timed_process.part
        if part is not None and part.recorder is not None:
            part.recorder.warned(str(message), filename, lineno)
        show(message, category, filename, lineno, *args, **kwargs)

    return wrapper
