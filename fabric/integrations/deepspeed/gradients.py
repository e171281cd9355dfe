"""The gradients of an engine, which hold them in places of their own. What is private to DeepSpeed is here.

Seen in 0.19.8: stage 3, and offloaded optimizers, copy the first gradient of a step over what is there, by a
count of forwards. What had no gradient keeps that of a step before, and the second backward of one forward
takes the place of the first. So buffers are zeroed after each step here, and everything is added to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_ADD = 1
"""As a number of a micro-step: not the first one, which copies."""


def stage_of(engine: Any) -> int:
    """1, 2 or 3."""
    return int(engine.zero_optimization_stage())


def begin(engine: Any) -> None:
    """Before a backward: what it makes is added to what is there, and its end is `end`.

    By itself the engine ends a backward when the graph has run, except where two forwards are in one loss.
    """
    engine.set_gradient_accumulation_boundary(False)
    engine.optimizer.clear_backward_seen_flag()  # as each forward does: there may be none in between
    engine.optimizer.micro_step_id = _ADD
    engine._running_engine_backward = True


def end(engine: Any, reached: bool) -> None:
    """After a backward. All ranks must call this."""
    engine._running_engine_backward = False
    if reached:
        engine._backward_epilogue()
    engine.optimizer._backward_active_depth = 0


def finish(engine: Any) -> None:
    """Make the means over ranks of all that backwards have added up. All ranks must call this."""
    engine.set_gradient_accumulation_boundary(True)
    if stage_of(engine) == 1:
        engine.allreduce_gradients()
    else:
        engine.optimizer.finalize_gradient_accumulation_boundary()


def parts(engine: Any) -> list[Tensor]:
    """After `finish`: this rank's part of the gradients, times the loss scale. A step takes what is written
    into them.
    """
    offloaded = _offloaded(engine.optimizer)
    if offloaded:
        return offloaded
    return [part for group in engine.optimizer.averaged_gradients.values() for part in group or ()]


def drop(engine: Any) -> None:
    """Forget all gradients."""
    optimizer = engine.optimizer
    optimizer.zero_grad()
    for part in _offloaded(optimizer):
        part.zero_()
    if stage_of(engine) == 3:
        optimizer.grad_partitions_flat_buffer.zero_()
        return
    for table in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        table.update(dict.fromkeys(table))
    for part in getattr(optimizer, "accumulated_grads_in_cpu", {}).values():
        part.zero_()


def _offloaded(optimizer: Any) -> list[Tensor]:
    """Gradients that lie with the masters, where these are offloaded."""
    if not (getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)):
        return []
    name = "fp32_partitioned_groups_flat"
    masters = getattr(optimizer, name, None) or optimizer.single_partition_of_fp32_groups
    return [master.grad for master in masters if master.grad is not None]
