"""`LocalSGDStrategy`: ranks train independently and average their parameters periodically."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.core.errors import ArgumentTypeError
from fabric.precision.mixed import MixedPrecision
from fabric.strategies.local_sgd.layout import LocalSteps
from fabric.strategies.parallel import ParallelStrategy, check_keywords
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
    """Data parallel training in which ranks average parameters every `sync_every` steps, and no gradients.

    Each rank clips and steps with its local gradients. At the end of a round parameters and floating buffers
    are replaced by their mean over ranks (local SGD). With an outer optimizer (DiLoCo) they are replaced by
    the result of its step: from the values at the end of the previous round, with the difference of these and
    the mean as gradient. Steps are counted per optimizer. Optimizer states are not synchronised.

    The communication is `1 / sync_every` of that of `DDPStrategy`. Results differ from `DDPStrategy`, except
    with `sync_every=1`, steps that are linear in the gradients (SGD), and no clipping.

    `fabric.save` and `fabric.whole` end the round early, and synchronise optimizer states: moments are
    averaged over the ranks that have them, other entries (step counts, the history of LBFGS) are those of the
    first rank that has them. So a checkpoint has one state. With an outer optimizer `fabric.load` and
    `model.load_state_dict` begin a new round from the loaded values. Call `fabric.strategy.end_round()`
    before an evaluation, so that all ranks evaluate the same model.

    Args:
        sync_every: Number of steps of a round, 1 or more.
        outer_optimizer: Creates an optimizer of a list of parameters, for example `lambda parameters:
            torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)`. It needs 4 bytes per parameter
            more than its states. None: ranks continue from the mean.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        kwargs: Other arguments of `ParallelStrategy`.

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
        check_keywords(self, LocalSGDStrategy, kwargs)
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
        """Return the function that `optimizer.step(closure)` runs. LBFGS uses the losses of this rank."""
        return Strategy.step_plan(self, optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step `optimizer`; `kwargs` are the user's (a `closure`). At the end of a round all ranks must call
        this.
        """
        with self.layout.step(optimizer):
            return super().optimizer_step(optimizer, **kwargs)

    def end_round(self) -> None:
        """End the round now: synchronise parameters and optimizer states. All ranks must call this."""
        self.check_barrier("end_round")
        self.layout.end_rounds()

    def save_checkpoint(
        self, path: PathLike, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> PendingSave | None:
        """End the round, and save with the gradient scale of rank zero. All ranks must call this.

        Arguments as for `Strategy.save_checkpoint`.
        """
        self.layout.end_rounds()
        if isinstance(self.precision, MixedPrecision) and self.precision.scaler is not None:
            self.precision.load_state_dict(self.broadcast(self.precision.state_dict()))
        return super().save_checkpoint(path, state, *args, **kwargs)
