"""`LossCheck`: records losses and batches of the first two backwards, which ranks compare once."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.parts import Part
from fabric.loss_check.compare import compare_first_steps
from fabric.loss_check.in_place import watch_sum
from fabric.loss_check.messages import warn_of_last_batch
from fabric.loss_check.record import MAX_LOSSES, NUM_CALLS, FirstSteps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.collectives.channel import Channel


def make_part(strategy: Any) -> LossCheck:
    """Return the loss check of a strategy with several ranks."""
    return LossCheck(strategy, strategy.replica_check is not False and strategy.traits.lockstep)


class LossCheck(Part):
    """The record of the first steps, until ranks compare it.

    Args:
        strategy: A strategy with several ranks, whose process group exists.
        compares: Whether ranks compare steps; otherwise only sums in place are watched.
    """

    name = "loss check"

    def __init__(self, strategy: Any, compares: bool) -> None:
        self._strategy = weakref.proxy(strategy)
        self._compares = compares
        self._first: FirstSteps | None = None
        self._replica_check: Any = None
        self._trained: weakref.WeakSet[Module] = weakref.WeakSet()
        self._num_losses = 0
        """Number of these backwards that were the first one of a module."""
        self._backwards = 0
        """Number of backwards that synchronised models, until they are compared."""
        self._ignores_last = False
        """Whether an uneven last batch needs no warning: the loop divides by items, or there was one."""

    def join(self, strategy: Any) -> None:
        """Count backwards with the replica check."""
        self._replica_check = strategy.find_part("replica check")
        if self._compares:
            self._replica_check.backward_listeners.append(self._compare)

    def added(
        self,
        model: Any | None,
        optimizers: Iterable[Optimizer],
        *,
        replicated: bool,
        rank_local: Iterable[str],
    ) -> None:
        """Record the first calls of a model, if it is replicated and no backward was synchronised."""
        if model is not None and replicated and self._compares and not self._backwards:
            kwargs = self._strategy.distributed_sampler_kwargs or {"num_replicas": 1}
            splits = self._strategy.traits.splits_parameters
            self._first = self._first or FirstSteps(kwargs["num_replicas"], splits)
            self._first.add_model(model)

    def normalizing(self, parameters: list[Any]) -> None:
        """Ignore rows and items of models with these parameters: the loop divides by the global count."""
        self._ignores_last = True
        if self._first is not None:
            self._first.normalize({*map(id, parameters)})

    def reducing(self, tensors: list[Tensor], label: str, is_mean: bool, channel: Channel) -> None:
        """Watch the gradients of tensors that are reduced in place."""
        for tensor in tensors:
            if not is_mean:
                watch_sum(tensor, label)
            elif self._first is not None and channel is self._strategy.channel():
                self._first.watch_mean(tensor, label)

    def _compare(self, modules: Collection[Module]) -> None:
        """Compare the first steps when they are recorded. All ranks must call this."""
        self._backwards += 1
        new = [module for module in modules if module not in self._trained]
        self._trained.update(new)
        self._num_losses += bool(new)
        # Two for each loss of a step.
        if self._first is None or self._backwards < NUM_CALLS * min(self._num_losses, MAX_LOSSES):
            return
        self._first.finish()
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            first, self._first = self._first, None
            self._replica_check.backward_listeners.remove(self._compare)
            compare_first_steps(first, self._strategy)

    def epoch_begun(self) -> int:
        """Return the number of synchronised backwards until now."""
        backwards: int = self._replica_check.backwards
        return backwards

    def epoch_ended(self, backwards_at_begin: int, uneven_rows: int) -> None:
        """Warn once of a last batch that ranks could not share equally, if the epoch had backwards: a resumed
        one may have none.
        """
        trained = self._replica_check.backwards > backwards_at_begin
        if uneven_rows and trained and self._compares and not self._ignores_last:
            self._ignores_last = True
            warn_of_last_batch(uneven_rows, self._strategy)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Context of training steps that are undone: they are not recorded."""
        first, self._first = self._first, None
        if first is not None:
            first.active = False
        try:
            yield
        finally:
            self._first = first
            if first is not None:
                first.active = True
