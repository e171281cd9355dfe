"""`ZeRO1Strategy`: all parameters on every rank, optimizer states on one rank each."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from fabric.strategies.ddp import DDPStrategy
from fabric.strategies.layouts.zero1 import ShardedStates

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.optim import Optimizer

    from fabric.accelerators.accelerator import Accelerator
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.plugins.io.checkpoint_io import CheckpointIO
    from fabric.plugins.precision.precision import Precision
    from fabric.strategies.layouts.context.part import ContextParallel


class ZeRO1Strategy(DDPStrategy):
    """Data parallel training in which the states of each optimizer are divided over ranks (ZeRO stage 1).

    Gradients are averaged as in `DDPStrategy`; every rank then steps its share of the parameters, and sends
    them to the others. The numbers are those of `DDPStrategy`. Memory for Adam in float32, bytes a parameter:
    4 (parameter) + 4 (gradient) + 8 / ranks (states).

    The optimizer must update each parameter by its own gradient and state. LBFGS is refused; others that
    compute one value from all parameters (a global norm inside the step, as some LAMB; D-Adaptation, Prodigy)
    cannot be told from the rest and would see one rank's share: use "ddp" for them. A step that was given to
    torch.compile runs uncompiled.

    Args:
        accelerator: As in `DDPStrategy`.
        parallel_devices: As in `DDPStrategy`.
        cluster_environment: As in `DDPStrategy`.
        checkpoint_io: As in `DDPStrategy`.
        precision: As in `DDPStrategy`.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        start_method: As in `DDPStrategy`.
        startup_timeout: As in `DDPStrategy`.
        context_parallel: `ContextParallel(...)`: long sequences are divided over ranks; None: they are not.
        kwargs: Keywords of DistributedDataParallel.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        startup_timeout: timedelta = timedelta(minutes=10),
        context_parallel: ContextParallel | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision,
            process_group_backend,
            timeout,
            start_method,
            startup_timeout=startup_timeout,
            context_parallel=context_parallel,
        )
        self.layout: ShardedStates = ShardedStates(kwargs)

    def step_plan(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """What `optimizer.step(closure)` runs: a step that fails on one rank fails on all."""
        return self.layout.joint_step(optimizer, super().step_plan(optimizer))
