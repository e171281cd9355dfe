"""`fabric.find_batch_size`: the largest batch size whose training step fits on all ranks. Called by `Fabric`.

Nothing communicates during a try, so that a rank that is out of memory leaves no other rank waiting.
"""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.batch_size._torch import local_collectives
from fabric.batch_size.undo import StepUndo
from fabric.core.errors import (
    ArgumentTypeError,
    CollectiveMismatch,
    ConfigurationError,
    FabricError,
    RankError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_ATTEMPTS = 64
"""Most verbs of the step in which other ranks may wait before all ranks exchange their results."""
_SECONDARY = (" CollectiveMismatch: ", " RankError: ")
"""Errors that a rank raises in a verb of its step while another rank is out of memory."""
_LAYOUTS = (
    "fabric.strategies.layout",
    "fabric.strategies.ddp.replicate",
    "fabric.strategies.zero1.layout",
    "fabric.strategies.fsdp.fully_shard",
)
"""Modules of layouts that work after a step that was out of memory, and without the values of other ranks."""


class BatchSize(NamedTuple):
    """The result of `fabric.find_batch_size`: `batch_size` rows of a rank, `accumulation` times per step."""

    batch_size: int
    accumulation: int


def find_batch_size(strategy: Any, step: Callable[[int], Any], start: int, global_batch: int) -> BatchSize:
    """Return the result of `Fabric.find_batch_size`, which documents the arguments."""
    try:
        rows = _checked_rows(strategy, step, start, global_batch)
    except FabricError as error:
        strategy.abort_call("find_batch_size", error)
    strategy.check_barrier("find_batch_size", f"start={start}, global_batch={global_batch}")
    strategy.barrier()  # communication libraries allocate their buffers in their first call
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    undo, reason = StepUndo(strategy), ""
    fits, fails = -1, len(sizes)  # indices of `sizes`
    index = max(0, bisect_right(sizes, start) - 1)
    while fails - fits > 1:
        if failed := _out_of_memory(strategy, step, sizes[index], undo):
            fails, reason = index, failed
        else:
            fits = index
        doubled = bisect_left(sizes, 2 * sizes[max(fits, 0)])
        index = min(doubled, fails - 1) if fails == len(sizes) else (fits + fails) // 2
    if fits < 0:
        raise UsageError(
            f"A step with a batch size of 1 does not fit on {reason}. Split the model over more devices with "
            'strategy="fsdp", write precision="bf16-mixed", or checkpoint activations.'
        )
    return BatchSize(sizes[fits], rows // sizes[fits])


def _checked_rows(strategy: Any, step: Any, start: Any, global_batch: Any) -> int:
    """Return the rows of each rank in one global batch."""
    if not callable(step):
        raise ArgumentTypeError(
            f"fabric.find_batch_size got {step!r} as step. It calls step(batch_size) with several sizes. "
            "Write `def step(batch_size):` with one training step, and pass step."
        )
    for name, value in (("start", start), ("global_batch", global_batch)):
        if type(value) is not int or value < 1:
            kind = ConfigurationError if type(value) is int else ArgumentTypeError
            raise kind(f"{name}={value!r} is no number of rows. Write an int of 1 or more: {name}=8.")
    if strategy.root_device.type == "cpu":
        raise ConfigurationError(
            "fabric.find_batch_size on the CPU. The host's memory has no limit that ends in an error: the "
            'kernel ends the process. Write Fabric(accelerator="gpu"), or run `fabric plan train.py`.'
        )
    if type(strategy.layout).__module__ not in _LAYOUTS or any(
        [part.name != "report" for part in strategy.argument_parts]
    ):
        raise ConfigurationError(
            f"fabric.find_batch_size with {type(strategy).__name__}. Its steps wait for data, which a rank "
            'that is out of memory does not send. Run `fabric plan train.py`, or write strategy="fsdp".'
        )
    if not strategy.modules:
        raise UsageError(
            "fabric.find_batch_size found no model that is set up, to restore it. Write model, optimizer = "
            "fabric.setup(model, optimizer) before it."
        )
    if any([p.grad is not None for module in strategy.modules for p in module.parameters()]):
        raise UsageError(
            "fabric.find_batch_size found gradients, which the tries would change. Write "
            "optimizer.zero_grad() before it."
        )
    shards = strategy.data_rank[1]
    if global_batch % shards:
        below = global_batch // shards * shards
        sizes = " or ".join([f"global_batch={size}" for size in (below, below + shards) if size])
        raise ConfigurationError(
            f"global_batch={global_batch} on {shards} ranks that read different data. Each rank needs the "
            f"same number of rows. Write {sizes}."
        )
    return int(global_batch // shards)


def _out_of_memory(strategy: Any, step: Callable[[int], Any], size: int, undo: StepUndo) -> str:
    """Run two steps and undo them; return a text on the rank that is out of memory, or "". All ranks must
    call this.

    The second step has the optimizer states that the first step created.
    """
    error, reason = None, ""
    try:
        with undo, local_collectives():
            for _ in range(2):
                step(size)
            strategy.accelerator.synchronize(strategy.root_device)
    except Exception as raised:
        # A memory error is not kept: its traceback references the step's tensors.
        reason = _memory_text(raised)
        error = None if reason else raised
    gc.collect()
    getattr(torch.get_device_module(strategy.root_device), "empty_cache", gc.collect)()
    outcome, rows = (reason, "" if error is None else f"{type(error).__name__}: {error}"), None
    attempts = 0
    while rows is None:
        try:
            rows = strategy.all_gather_object(outcome, label="find_batch_size")
        except CollectiveMismatch:  # other ranks are in a verb of the step, and raise now, too
            attempts += 1
            if attempts > _ATTEMPTS:  # there is another cause: ranks wait in different groups
                raise
    full = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(rows) if text]
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(rows) if text]
    first = [text for text in failed if not any(name in text for name in _SECONDARY)]
    if first and f"rank {strategy.global_rank}: {outcome[1]}" not in first:
        raise RankError(f"The step failed with a batch size of {size} on {first[0]}")
    if error is not None and (first or not full):
        raise error
    return full[0] if full else ""


def _memory_text(error: BaseException | None) -> str:
    """Return the first sentence of a memory error or of its cause; "": another error."""
    if error is None:
        return ""
    if isinstance(error, torch.OutOfMemoryError) or any([text in str(error) for text in _OUT_OF_MEMORY]):
        return str(error).partition("\n")[0].partition(". ")[0]
    return _memory_text(error.__cause__)
