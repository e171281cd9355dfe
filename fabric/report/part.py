"""`Report`: the part of a strategy that records the run. While it records, calls of Fabric and waits of
torch.distributed are replaced by timed ones; without a report this module is not imported.
"""

from __future__ import annotations

import atexit
import platform
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.core.backward_listeners import add_backward_listener
from fabric.core.errors import ConfigurationError, FabricError
from fabric.core.parts import Part
from fabric.report.calls import (
    BACKWARD,
    COMMUNICATION,
    TimedForward,
    comparing,
    recorder_here,
    replacements,
    timed_process,
)
from fabric.report.file import RankFile, check_directory
from fabric.report.format import FILE_NAME
from fabric.report.recorder import Recorder, memory_reader
from fabric.report.stragglers import Stragglers
from fabric.strategies._torch import call_after_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer


def record(fabric: Any, given: Any) -> None:
    """Record the run of `fabric` in a directory from its launch on.

    Args:
        fabric: Before its strategy is bound to the plan.
        given: The argument `report` of `Fabric`; None: FABRIC_REPORT.

    Raises:
        ConfigurationError, ArgumentTypeError: See `check_directory`.
    """
    script = Path(sys.argv[0]).name
    fabric.strategy.argument_parts.append(part := Report(check_directory(given, script), script))
    fabric._run_in_rank = partial(_run_recorded, fabric, part)


def _run_recorded(fabric: Any, part: Report, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `function` on this rank, and record the error that ends it."""
    try:
        return type(fabric)._run_in_rank(fabric, function, *args, **kwargs)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            part.end(error)
        raise


class Report(Part):
    """The recorder of this rank, and what feeds it.

    Args:
        directory: Of the report.
        script: The name of the script of this run.
    """

    name = "report"

    def __init__(self, directory: Path, script: str) -> None:
        self._directory, self._script = directory, script
        self.recorder: Recorder | None = None
        self._undo: list[Callable[[], Any]] = []
        self._former_error: Any = None
        self._waits = False
        """Whether a backward ends with a wait for other ranks."""

    def __reduce__(self) -> Any:
        return Report, (self._directory, self._script)

    def join(self, strategy: Any) -> None:
        """Open this rank's file, and record from now on. All ranks must call this.

        Raises:
            ConfigurationError: A rank cannot write its file; on all ranks.
        """
        if timed_process.part is not None:
            timed_process.part.end()
        topology, rank = strategy.topology, strategy.global_rank
        is_member = topology.world_size > 1 and strategy.collective.world_size > 0
        file, text = None, ""
        try:
            file = RankFile(self._directory / FILE_NAME.format(rank), self._script)
        except (FabricError, OSError) as error:
            text = f"The report of rank {rank} cannot be written. {error}"
        rows = [(text, file.last if file else 0, rank, time.time())]
        if is_member:
            rows = strategy.all_gather_object(rows[0], label="report")
        texts = [row[0] for row in rows if row[0]]
        if file is None or texts:
            if file is not None:
                file.close()
            raise ConfigurationError(texts[0])
        last, device = max([row[1] for row in rows]), strategy.root_device
        self.recorder = Recorder(file, last, self._facts(strategy), memory_reader(device))
        group = (strategy.process_group or dist.group.WORLD) if is_member and dist.is_initialized() else None
        if group is not None:
            ranks, prefix = [row[2] for row in rows], f"fabric-report/{rows[0][3]}"
            self.recorder.stragglers = Stragglers(group.get_group_store(), prefix, topology.rank, ranks)
        self._waits = is_member
        self._attach(strategy)

    def _facts(self, strategy: Any) -> dict[str, Any]:
        return {
            "rank": strategy.global_rank,
            "world_size": strategy.world_size,
            "hostname": socket.gethostname(),
            "script": self._script,
            "strategy": type(strategy).__name__,
            "precision": str(strategy.precision.precision),
            "accelerator": strategy.root_device.type,
            "versions": {
                "fabric": vars(sys.modules["fabric"])["__version__"],
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            "parameters": 0,
        }

    def added(
        self,
        model: Any | None,
        optimizers: Iterable[Optimizer],
        *,
        replicated: bool,
        rank_local: Iterable[str],
    ) -> None:
        """Time the forward of a model, and let the first optimizer end steps."""
        if self.recorder is None:
            return
        if model is not None:
            model.__dict__["forward"] = TimedForward(model.__dict__["forward"])
            self.recorder.facts["parameters"] += sum([p.numel() for p in model.parameters()])
        for optimizer in optimizers:
            self.recorder.follow(optimizer)

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Time a backward pass. The time after its last operation is a wait for gradients of other ranks."""
        recorder = recorder_here()
        if recorder is None or timed_process.part is not self:
            run(tensors, *args, **kwargs)
            return
        previous, handle = recorder.switch(BACKWARD), None
        if self._waits:
            listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            roots = [root for root in listed if isinstance(root, torch.Tensor) and root.grad_fn is not None]
            # Its callback is the first of the pass: torch runs it before those that wait, as DDP's.
            wait = partial(call_after_backward, partial(recorder.switch, COMMUNICATION))
            handle = roots[0].register_hook(lambda _: wait()) if roots else None
        try:
            run(tensors, *args, **kwargs)
        finally:
            recorder.switch(previous)
            if handle is not None:
                handle.remove()

    def teardown(self) -> None:
        """End the recording."""
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Write the end or the failure of this run, and restore what was replaced."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return
        atexit.unregister(self._at_exit)
        while self._undo:
            self._undo.pop()()
        timed_process.part = None
        if error is None:
            recorder.event("end")
        else:
            recorder.failed(error)
        recorder.close()

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # what ends a script; at a prompt, any former one
        self.end(None if hasattr(sys, "ps1") or error is self._former_error else error)

    def _attach(self, strategy: Any) -> None:
        """Replace calls by timed ones, until `end`."""
        timed_process.part = self
        self._former_error = getattr(sys, "last_value", None)
        atexit.register(self._at_exit)
        add_backward_listener(self)
        for owner, name, wrap in replacements():
            self._replace(owner, name, wrap)
        if (check := strategy.find_part("replica check")) is not None:
            self._replace(check, "compare", comparing)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        own = vars(owner).get(name)
        ours = wrap(getattr(owner, name))
        setattr(owner, name, ours)

        def undo() -> None:
            if vars(owner).get(name) is not ours:  # replaced by others since
                return
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)
