"""`fabric.plan`: strategies that fit into a device's memory, by running the loop as one of N ranks.

`simulate.py` counts the memory of each case; this module compares cases and recommends one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.core.precision import parse_precision
from fabric.strategies.registry import STRATEGY_REGISTRY
from fabric.tools.plan.report import as_dict, as_text
from fabric.tools.plan.simulate import (
    Case,
    CaseResult,
    Run,
    SimulatedFabric,
    simulate,
    simulate_all,
)
from fabric.tools.plan.units import read_bandwidth, read_bytes, read_flops

if TYPE_CHECKING:
    from collections.abc import Callable

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
"""Compared by default, the fastest first; on several machines also hsdp, and the script's own."""
_PIPELINES = ("pipeline", "PipelineStrategy")
_NAMES = {"fsdp": "zero3", "ddp_sharded": "zero2", "auto": "ddp", "single_device": "ddp"}


@dataclass(frozen=True)
class PlanRequest:
    """The options of `fabric plan`, by their names."""

    devices: int = 1
    num_nodes: int = 1
    memory: int | None = None
    strategies: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    batch_size: int | None = None
    fake: bool = False
    bandwidth: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class PlanRow:
    """One strategy with one precision: memory and traffic of a rank."""

    strategy: str
    precision: str
    found: CaseResult
    largest: int | None = None
    """The largest batch size that fits; None: unknown."""
    fits: bool = False

    @property
    def sent(self) -> int:
        """Bytes that one rank sends in a step."""
        return sum(self.found.traffic.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Rows by strategy and precision, and the recommendation. `str(plan)` is the table.

    Args:
        request: The options of the plan.
        rows: One row for each strategy and precision, with the error if it could not run.
        own_precision: The precision in the script, for example "32-true".
    """

    request: PlanRequest
    rows: list[PlanRow]
    own_precision: str

    @property
    def best(self) -> PlanRow | None:
        """The first row that fits, preferably with the precision of the script; None: no row fits."""
        rows = sorted(self.rows, key=lambda row: row.precision != self.own_precision)
        return next((row for row in rows if row.fits), None)

    def __str__(self) -> str:
        return as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values of JSON."""
        return as_dict(self)


def plan(
    model: Any,
    optimizer: Any,
    batch: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    devices: int = 1,
    memory: str | int | None = None,
    num_nodes: int = 1,
    strategy: str | list[str] | None = None,
    precision: str | list[str] | None = None,
    batch_size: int | None = None,
    fake: bool = False,
    bandwidth: str | None = None,
    flops: str | None = None,
) -> MemoryPlan:
    """Predict the memory of a rank, the bytes that it sends and the largest batch, by strategy and precision.

    Two steps run in forks of this process, on the host. Call it before `fabric.launch()`, with a model on the
    CPU; the model and the optimizer stay unchanged.

    Args:
        model: As for `fabric.setup`.
        optimizer: An optimizer of the model's parameters.
        batch: A batch of one rank, as from a loader; its tensors have the samples along dim 0.
        loss: Function (model, batch) that returns the loss. None: `model(batch)`, of a tuple the first
            entry, of a dict `model(**batch)`; `.loss` of the output, or the mean of its first tensor.
        devices: Number of ranks of each machine.
        memory: Memory of each device: "80GB", or a number of bytes. None: no column on what fits.
        num_nodes: Number of machines.
        strategy: Names; None: ddp, zero1, zero2, zero3, and with several machines hsdp.
        precision: Names; None: "32-true" and "bf16-mixed".
        batch_size: Number of samples of a rank; None: as in `batch`.
        fake: Whether tensors have no values, and models need no memory.
        bandwidth: Bandwidth of each rank, "400Gb/s": adds a lower bound of the time of a step.
        flops: Operations per second of each rank, "400T": as `bandwidth`.

    Raises:
        ConfigurationError: Unknown names, a size without a unit.
        ArgumentTypeError: `model` is no module, or not on the CPU.
        UsageError: No case could run; or `fabric.launch()` was called already.
    """
    if dist.is_initialized():
        raise UsageError(
            "fabric.plan was called after ranks had joined. It needs a process of its own. Call it before "
            "fabric.launch()."
        )
    if not isinstance(model, torch.nn.Module) or any([p.device.type != "cpu" for p in model.parameters()]):
        what = f"a {type(model).__name__}" if not isinstance(model, torch.nn.Module) else "on a device"
        raise ArgumentTypeError(
            f"fabric.plan takes a torch module on the CPU, but got {what}. Call it before model.to(device)."
        )
    request = PlanRequest(
        devices,
        num_nodes,
        memory if memory is None or isinstance(memory, int) else read_bytes(memory, "memory="),
        listed(strategy),
        listed(precision),
        batch_size,
        fake,
        None if bandwidth is None else read_bandwidth(bandwidth),
        None if flops is None else read_flops(flops),
    )

    def loop() -> None:
        job = SimulatedFabric()
        job.launch()
        wrapped, stepped = job.setup(model, optimizer)
        while True:
            given = Run.current.deliver(batch)
            stepped.zero_grad()
            job.backward((loss or _loss)(wrapped, given))
            stepped.step()

    return make_plan(loop, request)


def make_plan(loop: Callable[[], Any], request: PlanRequest) -> MemoryPlan:
    """Return the plan of a loop, which makes a `fabric.Fabric` and trains.

    Raises:
        ConfigurationError: Unknown names.
        UsageError: The loop could not run with any strategy.
    """
    _check(request)
    case = Case(
        request.devices,
        request.num_nodes,
        batch_size=request.batch_size,
        fake=request.fake,
        flops=request.flops is not None,
    )
    first = (request.strategies or STRATEGIES)[0]
    one = (simulate_all if first in _PIPELINES else simulate)(case._replace(strategy=first), loop)
    if one.error and not one.given:
        raise UsageError(f"No step could be run: {one.error}")
    own = one.given.get("precision", "32-true")
    written = one.given.get("strategy", "auto")
    strategies: list[str | None] = [*(request.strategies or STRATEGIES)]
    if not request.strategies:
        strategies += ["hsdp"] * (request.num_nodes > 1)
        if _NAMES.get(written, written) not in strategies:
            strategies.append(None)  # that of the script, if it is none of these
    precisions = request.precisions or tuple(dict.fromkeys((own, "bf16-mixed")))
    rows = []
    for precision in precisions:
        for strategy in strategies:
            again = strategy == first and precision == own
            chosen = case._replace(strategy=strategy, precision=precision)
            run = simulate_all if (strategy or written) in _PIPELINES else simulate
            found = one if again else run(chosen, loop)
            rows.append(_row(strategy or written, precision, chosen, found, partial(run, loop=loop), request))
    if all([row.found.error for row in rows]):
        raise UsageError(f"No step could be run: {rows[0].found.error}")
    return MemoryPlan(request, rows, own)


def _row(
    strategy: str,
    precision: str,
    case: Case,
    found: CaseResult,
    run: Callable[[Case], CaseResult],
    request: PlanRequest,
) -> PlanRow:
    """Return the row of a case, with the largest batch size by a second run with another batch."""
    if found.error or request.memory is None:
        return PlanRow(strategy, precision, found)
    fits = found.peak.bytes <= request.memory
    rows = found.batch_size
    if rows is None:
        return PlanRow(strategy, precision, found, fits=fits)
    other = run(case._replace(scale=0.5 if rows > 1 else 2.0, flops=False))
    if other.error:
        return PlanRow(strategy, precision, found, fits=fits)
    pairs = zip(found.ranks or [found], other.ranks or [other], strict=True)
    largest = min([largest_batch(one, two, request.memory) for one, two in pairs])
    return PlanRow(strategy, precision, found, largest, fits)


def largest_batch(one: CaseResult, other: CaseResult, memory: int) -> int:
    """Return the largest number of samples with which a step needs at most `memory` at each time; 0: none.

    The memory after each allocation is linear in the samples, by two runs, and the peak grows at least as
    fast as between them. If the runs made different allocations, the peak limits the number.
    """
    a, b = [torch.tensor(found.curve, dtype=torch.float64) for found in (one, other)]
    first, second = [found.batch_size or 1 for found in (one, other)]
    a, b = [torch.cat([curve[: len(curve) * (len(a) == len(b))], curve.max().view(1)]) for curve in (a, b)]
    slope = (b - a) / (second - first)
    grows = slope > 0
    if (a[~grows] > memory).any():
        return 0
    room = first + (memory - a[grows]) / slope[grows]
    return max(0, math.floor(room.min())) if len(room) else first


def _check(request: PlanRequest) -> None:
    for name in request.strategies:
        STRATEGY_REGISTRY.get(name)  # raises for one that is unknown
    for name in request.precisions:
        parse_precision(name)
    for option in ("devices", "num_nodes", "batch_size"):
        value = getattr(request, option)
        if value is not None and (not isinstance(value, int) or value < 1):
            text = f"{option}={value!r} must be a whole number, at least 1. Write {option}=8."
            raise ConfigurationError(text)


def listed(names: str | list[str] | None) -> tuple[str, ...]:
    """Return the names in a list, or in a str with commas."""
    listed = names.split(",") if isinstance(names, str) else names or ()
    return tuple([name.strip() for name in listed])


def _loss(model: Any, batch: Any) -> torch.Tensor:
    given = batch[0] if isinstance(batch, tuple | list) else batch
    output = model(**given) if isinstance(given, dict) else model(given)
    loss = getattr(output, "loss", None)
    if loss is None:
        first = output[0] if isinstance(output, tuple | list) else output
        loss = first.float().mean()
    return loss  # type: ignore[no-any-return]
