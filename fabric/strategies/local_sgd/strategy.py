"""`LocalSGDStrategy`: ranks step by themselves and are averaged now and then, for slow networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.core.errors import ArgumentTypeError
from fabric.precision.mixed import MixedPrecision
from fabric.strategies.local_sgd.layout import LocalSteps
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.rows import check_number
from fabric.strategies.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch import Tensor
    from torch.optim import Optimizer
    from typing_extensions import Unpack

    from fabric.checkpoint.background.pending import PendingSave
    from fabric.core.types import PathLike
    from fabric.strategies.parallel import Processes


class LocalSGDStrategy(ParallelStrategy):
    """Data parallel training in which ranks send parameters after every `sync_every` steps, and no gradients.

    Each rank steps by its own gradients (clipping is of these, too); at the end of a round all go on from the
    mean of their parameters and floating buffers (local SGD). With an outer optimizer they go on from where
    it steps (DiLoCo). It steps from the values at the end of the previous round; its gradient is the
    difference of these and that mean. Steps count by optimizer. The states of the optimizers stay each
    rank's own.

    Other numbers than those of `DDPStrategy`, unless `sync_every=1`, the step is linear in the gradients
    (SGD) and nothing is clipped: `1 / sync_every` of the messages, for more steps.

    `fabric.save` and `fabric.whole` end the round early, also for the states of the optimizers: moments
    become the means of the ranks that have them, all else (numbers of steps, the history of LBFGS) is the
    first rank's that has it. So a checkpoint has one state. Where there is an outer optimizer, a round begins
    from the values that `fabric.load` or `model.load_state_dict` gave. Call `fabric.strategy.end_round()`
    before an evaluation that sees one model.

    Args:
        sync_every: Steps of a round, 1 or more.
        outer_optimizer: Makes an optimizer of a list of parameters, for example `lambda parameters:
            torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)`; it needs 4 bytes a parameter
            more than its own states. None: ranks go on from the mean.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        kwargs: Others of `ParallelStrategy`.

    Raises:
        ConfigurationError: `sync_every` is less than 1.
        ArgumentTypeError: `sync_every` is no integer, or `outer_optimizer` no function.
    """

    layout: LocalSteps

    def __init__(
        self,
        sync_every: int = 16,
        outer_optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **kwargs: Unpack[Processes],
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, **kwargs)
        check_number("sync_every", sync_every)
        if outer_optimizer is not None and not callable(outer_optimizer):
            raise ArgumentTypeError(
                f"outer_optimizer={type(outer_optimizer).__name__}(...) must be a function that makes one, "
                "since its parameters are copies. Write outer_optimizer=lambda parameters: "
                "torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)."
            )
        self.layout = LocalSteps(sync_every, outer_optimizer)

    def step_plan(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the function that `optimizer.step(closure)` runs. LBFGS uses the losses of its own rank."""
        return Strategy.step_plan(self, optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step the optimizer. At the end of a round all ranks must do so."""
        with self.layout.step(optimizer):
            return super().optimizer_step(optimizer, **kwargs)

    def end_round(self) -> None:
        """Let all ranks go on from one state, now. All ranks must call this."""
        self.check_barrier("end_round")
        self.layout.end_rounds()

    def save_checkpoint(
        self, path: PathLike, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> PendingSave | None:
        """End the round, and save with the gradient scale of rank zero. All ranks must call this."""
        self.layout.end_rounds()
        if isinstance(self.precision, MixedPrecision) and self.precision.scaler is not None:
            self.precision.load_state_dict(self.broadcast(self.precision.state_dict()))
        return super().save_checkpoint(path, state, *args, **kwargs)
