"""A pipeline's memory by stage, its bubble, and its steps against torch.distributed.pipelining by hand."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from harness import interleave, on_a_rank, ranks, ratios, show, summarise, table, timing_table
from layouts import count as count_messages
from memory import MALLOC, MIB, peak, settled
from torch import nn
from torch.nn.functional import mse_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from harness import Samples, Table
    from torch import Tensor

BLOCKS = 8
"""Equal ones, Linear(w, 4 w), GELU, Linear(4 w, w), which 2 and 4 stages divide."""
MICRO_BATCHES = 8
CHECKPOINTS = ("never", "except_last", "always")
RAW = "model(x) and fabric.backward"
ALTERNATING = "pipeline_step (1f1b)"
FORMS = (RAW, ALTERNATING)
WHOLE, IN_PARTS = "whole batch at once", f"in {MICRO_BATCHES} micro-batches"
EARLY = (ALTERNATING, IN_PARTS, "torch Schedule1F1B")
"""A micro-batch goes back as soon as it can."""
ONE, BOTH = "one process, other core idle", "one process on each core"
TARGET = 1.05
ROUNDS = os.environ.get("FABRIC_BENCH_ROUNDS")
QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""The profiler writes no line on standard error about each of its starts."""


@dataclass(frozen=True)
class Size:
    """A model's width, and the rows of one micro-batch."""

    width: int
    rows: int


@dataclass(frozen=True)
class Scale:
    """Sizes of one run of this script."""

    rounds: int
    memory: Size
    bubble: Size
    overhead: tuple[Size, ...]


FULL = Scale(int(ROUNDS or 40), Size(256, 512), Size(256, 64), (Size(256, 64), Size(64, 16)))
QUICK = Scale(int(ROUNDS or 3), Size(64, 128), Size(64, 32), (Size(64, 32), Size(16, 8)))


@dataclass
class Loop:
    """Forward and backward of one batch, the parameters that are held here by name, and the optimizer."""

    run: Callable[[], Any]
    parameters: dict[str, nn.Parameter]
    step: Callable[[], Any] = field(default=lambda: None)
    states: dict[Any, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """No gradients, as after `zero_grad()`."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def zero(self) -> None:
        """Gradients of zeros, in the memory that they have."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()


def network(width: int) -> nn.Sequential:
    """Alike on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*[
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(BLOCKS)
    ])  # fmt: skip


@cache
def batch(size: Size, micro_batches: int) -> list[Tensor]:
    """A batch and its target, alike on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(2, micro_batches * size.rows, size.width, generator=generator))


def plain(size: Size, micro_batches: int, parts: int) -> Loop:
    """The whole model in one process by torch alone, `micro_batches` of rows in so many parts."""
    model, (x, y) = network(size.width), batch(size, micro_batches)
    optimizer = torch.optim.Adam(model.parameters())

    def run() -> None:
        for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (mse_loss(model(inputs), targets) / parts).backward()

    return Loop(run, dict(model.named_parameters()), optimizer.step, optimizer.state)


def by_hand(schedule: str, size: Size, micro_batches: int) -> Loop:
    """This rank's stage by torch.distributed.pipelining; losses come to the last rank."""
    from torch.distributed import pipelining

    rank, stages = dist.get_rank(), dist.get_world_size()
    share = BLOCKS // stages
    model, (x, y) = network(size.width), batch(size, micro_batches)
    part = model[rank * share : (rank + 1) * share]
    stage = pipelining.PipelineStage(part, rank, stages, torch.device("cpu"))
    order = getattr(pipelining, schedule)(stage, micro_batches, loss_fn=mse_loss)
    inputs = (x,) if rank == 0 else ()
    last = {"target": y, "losses": []} if rank == stages - 1 else {}
    return Loop(lambda: order.step(*inputs, **last), dict(part.named_parameters()))


def ours(form: str, size: Size, micro_batches: int, checkpoint: str = "never") -> Loop:
    """This rank's stage by this package."""
    from fabric import Fabric
    from fabric.strategies import PipelineStrategy

    stages = dist.get_world_size()
    strategy = PipelineStrategy(
        balance=[BLOCKS // stages] * stages,
        num_microbatches=micro_batches,
        checkpoint=checkpoint,
    )
    fabric = Fabric(accelerator="cpu", devices=stages, strategy=strategy)
    fabric.launch()
    module, (x, y) = network(size.width), batch(size, micro_batches)
    adam = torch.optim.Adam(module.parameters())
    model, optimizer = fabric.setup(module, adam)
    held = {name: p for name, p in model.named_parameters() if p.numel()}

    if form == RAW:
        return Loop(lambda: fabric.backward(mse_loss(model(x), y)), held, optimizer.step, adam.state)
    return Loop(lambda: model.pipeline_step(x, y, mse_loss), held, optimizer.step, adam.state)


def check(loops: dict[str, Loop], reference: Loop) -> None:
    """Raise unless all loops have the gradients of the reference: what is compared does the same work."""
    reference.clear()
    reference.run()
    for name, loop in loops.items():
        loop.clear()
        loop.run()
        for key, parameter in loop.parameters.items():
            wanted, got = reference.parameters[key].grad, parameter.grad
            if got is None or (got - wanted).norm() > 1e-4 * wanted.norm():
                raise RuntimeError(f"{name}: the gradient of {key} is not that of the model in one process")


def due(form: str, checkpoint: str, stage: int, stages: int, size: Size) -> int:
    """Bytes of activations that a stage holds at its fullest.

    A micro-batch of a block leaves its input, and 4 times as much before and after GELU each. The first
    stage's input is the user's batch; the last one's output is kept by the loss.
    """
    one, last = size.rows * size.width * 4, stage == stages - 1
    held = min(MICRO_BATCHES, stages - stage) if form in EARLY else MICRO_BATCHES
    inside, received = 9 * one * (BLOCKS // stages) - one, 0 if stage == 0 else one
    # Under 1f1b the last stage's micro-batches go back at once: "except_last" is for them as "never".
    if checkpoint == "never" or (form == ALTERNATING and checkpoint == "except_last" and last):
        total = held * (inside + received)
    else:
        # Inputs of all; one micro-batch is computed again, from a copy of its input.
        total = held * received + one + inside
    if form == RAW:
        return total + 2 * MICRO_BATCHES * one  # the joined output, and its gradient
    return total + (held * one if last else 0)


def peak_live(call: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator gave out and had not back, beyond those of before the call."""
    gc.collect()
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        call()
    # Every allocation and release of the process, signed, kernels' temporaries included.
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    if not events:
        raise RuntimeError("torch's profiler recorded no memory events: activations cannot be counted")
    return most


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages behind tensors that have memory, each counted once."""
    real = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_meta]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in real}
    return sum(storages.values())


def observe(make: Callable[[], Loop]) -> dict[str, int]:
    """What one rank holds after a step, and the most that it holds of activations within one."""
    base = settled()
    loop = make()
    loop.run()
    loop.step()
    parameters = list(loop.parameters.values())
    states = [value for state in loop.states.values() for value in state.values()]
    state = storage_bytes([*parameters, *[p.grad for p in parameters], *states])
    stays = settled() - base
    # Gradients keep their memory, so that what comes on top are activations and temporaries.
    loop.zero()
    live = peak_live(loop.run)
    loop.zero()
    before = settled()
    most = peak(loop.run) - before
    elements = sum([p.numel() for p in parameters])
    return {"elements": elements, "state": state, "stays": stays, "live": live, "resident": most}


def memory(scale: Scale) -> dict[str, list[dict[str, int]]]:
    """Each case's figures by rank; all ranks call this."""
    size, m = scale.memory, MICRO_BATCHES
    small = Size(8, 2)
    cases: dict[str, Callable[[Size], Loop]] = {}
    if dist.get_world_size() == 1:
        cases = {WHOLE: lambda size: plain(size, m, 1), IN_PARTS: lambda size: plain(size, m, m)}
    else:
        for schedule in ("ScheduleGPipe", "Schedule1F1B"):
            cases[f"torch {schedule}"] = partial(by_hand, schedule, micro_batches=m)
        for checkpoint in CHECKPOINTS:
            for form in FORMS:
                cases[f"{form}|{checkpoint}"] = partial(ours, form, micro_batches=m, checkpoint=checkpoint)
    for make in cases.values():  # all code is loaded before the first baseline
        observe(partial(make, small))
        gc.collect()
        gc.freeze()  # collections pass over what was loaded
    batch(size, m)  # belongs to no case
    found = {}
    for name, make in cases.items():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, observe(partial(make, size)))
        found[name] = everyone
    return found


def by_stage(values: list[float], pattern: str) -> str:
    """One number of each stage, in a cell."""
    return " / ".join([pattern.format(value) for value in values])


def state_table(found: dict[int, Any]) -> Table:
    """Parameters, gradients and Adam's states against 16 bytes for each parameter of the stage."""
    rows = []
    note = (
        "Counted: storages of parameters, gradients and Adam's states after a step, without those on the "
        "meta device: stage 0 / stage 1 / ... Due: 16 bytes for each parameter of the stage, 1/p of the "
        "model. Resident: /proc/self/statm less the moment before the model was built."
    )
    head = ["case", "due MiB", "counted MiB", "ratio", "to one process", "resident MiB"]
    item = table("Parameters, gradients and Adam's states by stage", head, rows, note)
    single = found[1][WHOLE][0]
    for stages, cases in found.items():
        for name, everyone in cases.items():
            form, _, checkpoint = name.partition("|")
            if form not in (WHOLE, ALTERNATING):
                continue
            label = "one process, torch" if stages == 1 else f"{stages} stages, checkpoint={checkpoint!r}"
            wanted = single["elements"] * 16 / stages
            counted, resident = [r["state"] for r in everyone], [r["stays"] for r in everyone]
            rows.append([
                label, f"{wanted / MIB:.2f}", by_stage([c / MIB for c in counted], "{:.2f}"),
                f"{max(counted) / wanted:.4f}", f"{max(counted) / single['state']:.3f}",
                by_stage([r / MIB for r in resident], "{:.1f}"),
            ])  # fmt: skip
            if checkpoint == "except_last":
                per = max(counted) / single["elements"]
                what = f"pipeline, {stages} stages, bytes per parameter of the whole model (16/p)"
                values = {"ours": f"{per:.2f} (resident {max(resident) / single['elements']:.2f})"}
                summarise(item, what, values, f"{16 / stages:.2f}", "within 10 %")
    return item


def activation_table(found: dict[int, Any], size: Size) -> Table:
    """Peaks of one forward and backward over what was there before."""
    rows, live = [], {}
    note = (
        f"{MICRO_BATCHES} micro-batches of {size.rows} rows, width {size.width}. Counted: the most that "
        "torch's allocator has given out in forward and backward beyond what lived before (gradients did), "
        "by its own record of every allocation: activations, messages, temporaries of kernels and of "
        "gradients. Not in it: torch's receive buffers, which are made once, and what a step lets go of the "
        "step before (torch's outputs on the last stage). Due: the activations alone: of micro-batches held "
        "(m; under 1f1b min(m, p - s) on stage s) with checkpoint='never', else inputs of these and one in "
        "full; the first stage's input is the user's; model(x) has the output and its gradient on all ranks. "
        "Resident: VmHWM less VmRSS before."
    )
    head = ["p", "checkpoint", "form", "due MiB", "counted MiB", "ratio", "resident MiB", "to whole batch"]
    whole = found[1][WHOLE][0]["live"]
    for stages, cases in found.items():
        for name, everyone in cases.items():
            form, _, checkpoint = name.partition("|")
            mode = checkpoint or "never"
            wanted = [due(form, mode, stage, stages, size) for stage in range(stages)]
            counted, resident = [r["live"] for r in everyone], [r["resident"] for r in everyone]
            live[stages, form, mode] = counted
            cells = [by_stage([v / MIB for v in values], "{:.1f}") for values in (wanted, counted, resident)]
            over = by_stage([c / d for c, d in zip(counted, wanted, strict=True)], "{:.2f}")
            share = f"{max(counted) / whole:.3f}"
            rows.append([str(stages), mode, form, cells[0], cells[1], over, cells[2], share])
    item = table("Peak of activations by stage, p stages", head, rows, note)
    for stages in [stages for stages in found if stages > 1]:
        first = {form: c[0] for (p, form, mode), c in live.items() if (p, mode) == (stages, "never")}
        got, theirs = first[ALTERNATING] / first[RAW], first[EARLY[2]] / first["torch ScheduleGPipe"]
        what = f"pipeline, {stages} stages, {MICRO_BATCHES} micro-batches: stage 0's peak, 1f1b to gpipe"
        limit = f"{min(MICRO_BATCHES, stages) / MICRO_BATCHES:.3f} (torch {theirs:.3f})"
        summarise(item, what, {"ours": f"{got:.3f}"}, limit, "within 10 % of torch's")
    return item


def timed(loops: dict[str, Loop], rounds: int) -> Samples:
    """Seconds of each loop on this rank, without zero_grad; all ranks call this."""

    def before() -> None:
        for loop in loops.values():
            loop.clear()
        dist.barrier()

    return interleave({name: loop.run for name, loop in loops.items()}, rounds, before=before)


def bubble(scale: Scale) -> list[Table]:
    """Steps of 1, 2, 4 and 8 micro-batches on 2 ranks against theory; all ranks call this."""
    size, stages, rows = scale.bubble, dist.get_world_size(), []
    note = (
        f"Width {size.width}, micro-batches of {size.rows} rows, checkpoint='never'. Theory: "
        "(m + p - 1) / m of the time in which one process takes the same m micro-batches through the whole "
        "model by torch, over p; median over rounds. Once against one process while the other rank waits, "
        "and once while it does the same: cores that share caches and clocks slow each other down."
    )
    head = ["m", "form", "median ms", "one process ms", "theory", "measured", "to theory", "both cores busy"]
    item = table(f"The bubble: forward and backward on {stages} ranks", head, rows, note)
    for m in (1, 2, 4, 8):
        alone = plain(size, m, m)
        idle = Loop(lambda: None, alone.parameters)
        loops = {form: ours(form, size, m) for form in FORMS}
        check(loops, plain(size, m, 1))
        loops |= {ONE: alone if dist.get_rank() == 0 else idle, BOTH: plain(size, m, m)}
        samples = timed(loops, scale.rounds)
        to_one, to_both = ratios(samples, ONE), ratios(samples, BOTH)
        factor = (m + stages - 1) / (m * stages)
        base = statistics.median(samples[ONE])
        for form in FORMS:
            cells = [f"{statistics.median(samples[form]) * 1e3:.2f}", f"{base * 1e3:.2f}", f"{factor:.4f}"]
            shares = [to_one[form], to_one[form] / factor, to_both[form] / factor]
            rows.append([str(m), form, *cells, *[f"{share:.3f}" for share in shares]])
        values = {"ours": " / ".join([f"{to_one[form] / factor:.3f}" for form in FORMS])}
        what = f"pipeline, {stages} ranks, m = {m}, step to theory: {' / '.join(FORMS)}"
        limit = f"1 (a process beside a second one: {to_one[BOTH]:.3f})"
        summarise(item, what, values, limit, "-")
    return [item]


def overhead(scale: Scale) -> list[Table]:
    """Forward and backward against torch's schedules of the same kind; all ranks call this."""
    tables, messages = [], []
    for size in scale.overhead:
        for schedule, forms in (("ScheduleGPipe", (RAW,)), ("Schedule1F1B", (ALTERNATING,))):
            against = f"torch {schedule}"
            loops = {against: by_hand(schedule, size, MICRO_BATCHES)}
            loops["again"] = by_hand(schedule, size, MICRO_BATCHES)
            loops |= {form: ours(form, size, MICRO_BATCHES) for form in forms}
            check(loops, plain(size, MICRO_BATCHES, 1))
            tables.append(compare(against, forms, size, timed(loops, scale.rounds)))
            if size == scale.overhead[0]:
                messages += [[name, *count_messages(loops[name].run)] for name in (against, *forms)]
                dist.barrier()
    note = "Of rank 0, in forward and backward. Payload: whole tensors, heads of messages included."
    tables.append(table("Messages of a step", ["case", "messages", "payload MB"], messages, note))
    return tables


def compare(against: str, forms: tuple[str, ...], size: Size, samples: Samples) -> Table:
    """One table of times, and lines of the summary."""
    what = f"width {size.width}, {MICRO_BATCHES} micro-batches of {size.rows} rows, 2 ranks"
    title = f"{against}: forward and backward, {what}, target <= {TARGET}"
    note = (
        "checkpoint='never', zero_grad not timed, rank 0's time "
        "from a barrier on. By hand: outputs and losses on the last rank. model(x): output and loss on all; "
        "pipeline_step: the loss on all."
    )
    item = timing_table(title, samples, against, 1e-3, "ms", note)
    found = ratios(samples, against)
    for form in forms:
        values, limit = {"ours": f"{found[form]:.3f}"}, f"{found['again']:.3f} (raw again)"
        line = f"pipeline, {form}, vs {against} by hand, {what}"
        summarise(item, line, values, limit, f"<= {TARGET}")
    return item


TOPICS: dict[str, Callable[[Scale], Any]] = {"memory": memory, "bubble": bubble, "overhead": overhead}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic", nargs="?", choices=[*TOPICS, None], help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="small sizes and 3 rounds: only whether it runs")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    if options.topic:
        on_a_rank(lambda: TOPICS[options.topic](scale))
        return

    def start(topic: str, world: int, **more: str) -> Any:
        print(f"{topic}, {world} ranks ...", file=sys.stderr, flush=True)
        return ranks([__file__, topic, *sys.argv[1:]], world, 1200, OMP_NUM_THREADS="1", **more)

    found = {world: start("memory", world, **MALLOC, **QUIET) for world in (1, 2, 4)}
    tables = [state_table(found), activation_table(found, scale.memory)]
    show([*tables, *start("bubble", 2), *start("overhead", 2)])


if __name__ == "__main__":
    main()
