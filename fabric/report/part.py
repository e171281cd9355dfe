"""`Report`: the part of a strategy that records the run. While it records, calls of Fabric and waits of
torch.distributed are replaced by timed ones; without a report this module is not imported.
"""

from __future__ import annotations

import atexit
import platform
import socket
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.core.backward_listeners import add_backward_listener
from fabric.core.errors import ConfigurationError, FabricError
from fabric.core.parts import Part
from fabric.launch.parent_death import exit_listeners, report_exits
from fabric.launch.rank_exit import exit_reason
from fabric.report import calls
from fabric.report.file import RankFile, check_directory
from fabric.report.flops import peak_flops
from fabric.report.format import FILE_NAME
from fabric.report.recorder import StepRecorder
from fabric.report.stragglers import Stragglers
from fabric.strategies._torch import call_after_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fabric.launch.parent_death import ReportedExit


def record(fabric: Any, given: Any) -> None:
    """Record the run of `fabric` in a directory from its launch on.

    Args:
        fabric: A Fabric whose strategy is not bound to the plan yet.
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
    """The recorder of this rank, and the timed calls that it records.

    Args:
        directory: Directory of the report.
        script: The name of the script of this run.
    """

    name = "report"

    def __init__(self, directory: Path, script: str) -> None:
        self._directory, self._script = directory, script
        self.recorder: StepRecorder | None = None
        self._replaced: list[tuple[Any, str, Any, Any]] = []
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
        if calls.timed_process.part is not None:
            calls.timed_process.part.end()
        topology, rank, file, text = strategy.topology, strategy.global_rank, None, ""
        self._waits = topology.world_size > 1 and strategy.collective.world_size > 0
        try:
            file = RankFile(self._directory / FILE_NAME.format(rank), self._script)
        except (FabricError, OSError) as error:
            text = f"The report of rank {rank} cannot be written. {error}"
        rows = [(text, file.last if file else 0, rank, time.time())]
        if self._waits:
            rows = strategy.all_gather_object(rows[0], label="report")
        texts = [row[0] for row in rows if row[0]]
        if file is None or texts:
            if file is not None:
                file.close()
            raise ConfigurationError(texts[0])
        last = max([row[1] for row in rows])
        self.recorder = StepRecorder(file, last, _facts(strategy, self._script), strategy.root_device)
        group: Any = (strategy.process_group or dist.group.WORLD) if self._waits else None
        if group is not None:
            store = group.get_group_store()
            ranks, prefix = [row[2] for row in rows], f"fabric-report/{rows[0][3]}"
            self.recorder.stragglers = Stragglers(store, prefix, topology.rank, ranks)
        self._attach(strategy.find_part("replica check"))

    def added(
        self, model: Any | None, optimizers: Iterable[Any], *, replicated: bool, rank_local: Iterable[str]
    ) -> None:
        """Time the forward of a model, and let the first optimizer end steps."""
        if self.recorder is None:
            return
        if model is not None:
            model.__dict__["forward"] = calls.TimedForward(model.__dict__["forward"])
            self.recorder.facts["parameters"] += sum([p.numel() for p in model.parameters()])
        for optimizer in optimizers:
            self.recorder.set_step_optimizer(optimizer)

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Time a backward pass. The time after its last operation is a wait for gradients of other ranks."""
        recorder = self.recorder
        if recorder is None or recorder is not calls.recorder_here():
            run(tensors, *args, **kwargs)
            return
        previous, handle = recorder.switch(calls.BACKWARD), None
        roots = tensors if isinstance(tensors, list | tuple) else [tensors]
        roots = [root for root in roots if getattr(root, "grad_fn", None) is not None]
        if self._waits and roots:
            # The first callback of the pass: torch runs it before callbacks that wait, such as DDP's.
            wait = partial(call_after_backward, partial(recorder.switch, calls.COMMUNICATION))
            handle = roots[0].register_hook(lambda _: wait())
        counted = run if recorder.flops is None else partial(recorder.flops.run, run)
        try:
            counted(tensors, *args, **kwargs)
        finally:
            recorder.switch(previous)
            if handle is not None:
                handle.remove()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Context of steps that are undone: they are not recorded, nor their seconds."""
        if self.recorder is None:
            yield
            return
        calls.timed_process.part = None
        try:
            with self.recorder.paused():
                yield
        finally:
            calls.timed_process.part = self

    def teardown(self) -> None:
        """End the recording."""
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Write the end or the failure of this run, and restore the replaced calls."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return
        atexit.unregister(self._at_exit)
        with suppress(ValueError):
            exit_listeners.remove(self._on_exit)
        calls.timed_process.part = None
        for owner, name, own, ours in reversed(self._replaced):
            if vars(owner).get(name) is ours:  # else other code has replaced it since
                delattr(owner, name)
                if own is not None:
                    setattr(owner, name, own)
        self._replaced.clear()
        recorder.end(error)

    def _on_exit(self, error: ReportedExit, status: Any) -> None:
        """Record an exit with a status other than 0 as a failure."""
        if exit_reason(status)[0]:
            self.end(error)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # the error that ended a script; at a prompt, the last one
        self.end(None if hasattr(sys, "ps1") or error is self._former_error else error)

    def _attach(self, check: Any) -> None:
        calls.timed_process.part = self
        self._former_error = getattr(sys, "last_value", None)
        atexit.register(self._at_exit)
        report_exits(self._on_exit)
        add_backward_listener(self)
        compare = (
            [] if check is None else [(check, "compare", partial(calls.timed, calls.VERBS, calls.compared))]
        )
        replaced: list[tuple[Any, str, Any]] = [*calls.replacements(), *compare]
        for owner, name, wrap in replaced:
            ours = wrap(getattr(owner, name))
            self._replaced.append((owner, name, vars(owner).get(name), ours))
            setattr(owner, name, ours)


def _facts(strategy: Any, script: str) -> dict[str, Any]:
    fabric, rank, size = vars(sys.modules["fabric"])["__version__"], strategy.global_rank, strategy.world_size
    versions = {"fabric": fabric, "torch": str(torch.__version__), "python": platform.python_version()}
    facts = {"rank": rank, "world_size": size, "hostname": socket.gethostname(), "script": script}
    if (peak := peak_flops(strategy.root_device, strategy.precision.policy.compute)) is not None:
        facts["peak_flops"] = peak
    kinds = {"precision": str(strategy.precision.precision), "accelerator": strategy.root_device.type}
    return {**facts, "strategy": type(strategy).__name__, **kinds, "versions": versions, "parameters": 0}
