"""`ZeRO1Strategy`: all parameters on every rank, optimizer states on one rank each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.strategies.ddp.strategy import DDPStrategy
from fabric.strategies.zero1.layout import ShardedStates

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


class ZeRO1Strategy(DDPStrategy):
    """Data parallel training in which the states of each optimizer are divided over ranks (ZeRO stage 1).

    Gradients are averaged as in `DDPStrategy`; every rank then steps its share of the parameters, and sends
    them to the others. The numbers are those of `DDPStrategy`. Memory for Adam in float32, bytes a parameter:
    4 (parameter) + 4 (gradient) + 8 / ranks (states).

    The optimizer must update each parameter by its own gradient and state. LBFGS is refused at setup, and so
    are classes whose step computes one value from all parameters (a global norm, as some LAMB; D-Adaptation,
    Prodigy): a trial with small parameters finds them. Use "ddp" or "zero2" for them. A step that draws
    random numbers, or runs on devices only, is not tried. A step that was given to torch.compile runs
    uncompiled.

    Other methods of the optimizer that change parameters (`eval()` and `train()` of schedule-free ones) are
    calls of all ranks; afterwards all ranks have the owners' values.

    Arguments are those of `DDPStrategy`.
    """

    layout: ShardedStates
    _layout = ShardedStates

    def step_plan(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the function that `optimizer.step(closure)` runs; a failure on one rank fails all ranks."""
        return self.layout.joint_step(optimizer, super().step_plan(optimizer))
