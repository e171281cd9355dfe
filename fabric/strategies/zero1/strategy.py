"""`ZeRO1Strategy`: data parallel training with sharded optimizer states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.strategies.ddp.strategy import DDPStrategy
from fabric.strategies.zero1.layout import ShardedStates

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


class ZeRO1Strategy(DDPStrategy):
    """Data parallel training in which optimizer states are sharded across ranks (ZeRO stage 1).

    Gradients are averaged as in `DDPStrategy`. Each rank then steps its shard of the parameters and
    broadcasts them. Results are those of `DDPStrategy`. Memory for Adam in float32, in bytes per parameter:
    4 (parameter) + 4 (gradient) + 8 / ranks (states).

    The optimizer must update each parameter from its gradient and state alone. Setup raises for LBFGS, and
    for classes whose step computes one value from all parameters (a global norm, as some LAMB; D-Adaptation,
    Prodigy), which a trial with small parameters detects. Use "ddp" or "zero2" for them. A step that draws
    random numbers, or runs on devices only, is not tried. A compiled step runs uncompiled.

    Other methods of the optimizer that change parameters (`eval()` and `train()` of schedule-free ones) must
    be called by all ranks. Afterwards all ranks have the owners' values.

    Arguments are those of `DDPStrategy`.
    """

    layout: ShardedStates
    _layout = ShardedStates

    def step_plan(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the function that `optimizer.step(closure)` runs; an error on one rank is raised on all."""
        return self.layout.collective_step(optimizer, super().step_plan(optimizer))
