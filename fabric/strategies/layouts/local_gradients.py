"""`LocalGradients`: replicas whose gradients may be those of this rank only, and whether they are."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.plugins.collectives.frames import call_of
from fabric.strategies.layouts.agree import on_any_rank
from fabric.utilities.steps import watch_steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class LocalGradients:
    """Which replicas no backward has averaged yet, or since they were under `no_backward_sync`.

    Before such gradients are stepped with or clipped, ranks compare them: a loop may have dropped them, or
    averaged them itself. A loop that averages before each step compares nothing.

    Args:
        layout: Whose replicas these are; gives the channel of all ranks.
    """

    def __init__(self, layout: Any) -> None:
        self._layout = weakref.proxy(layout)
        self.replicas: weakref.WeakKeyDictionary[Any, dict[int, Tensor]] = weakref.WeakKeyDictionary()
        """With their parameters by id: a teacher that nobody trains is looked up in each step."""
        self._unwatch: Any = None
        self._stays = False

    def begin(self, replica: Any, new: bool = False) -> None:
        """The replica's next backwards average nothing; or it is new, and none has averaged anything yet."""
        if replica not in self.replicas:
            self.replicas[replica] = {id(p): p for p in replica.parameters()}
        self._stays = self._stays or not new
        if self._unwatch is None:
            self._unwatch = watch_steps(self)

    def before_pass(self, replicas: list[Any]) -> list[tuple[Any, list[Any]]]:
        """What `after_pass` is to be given, of those that average in a backward that begins."""
        return [(r, [stamp(p) for p in r.parameters()]) for r in replicas if r in self.replicas]

    def after_pass(self, before: list[tuple[Any, list[Any]]]) -> None:
        """The backward has averaged the gradients of the replicas that it came to."""
        for replica, stamps in before:
            if stamps != [stamp(p) for p in replica.parameters()]:
                self.replicas.pop(replica, None)
        if not self.replicas and not self._stays:  # a loop that averages in each backward pays for no look
            self._unwatch()
            self._unwatch = None

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before a step of any optimizer; a closure makes gradients in the step."""
        if self.replicas and len(args) == 1 and not kwargs:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self.check(held, f"{type(optimizer).__name__}.step()")

    def check(self, parameters: Iterable[Tensor], doing: str) -> None:
        """Raise on all ranks if unaveraged gradients of `parameters` differ between them. All ranks.

        Raises:
            UsageError: They do.
        """
        channel = self._layout.channel
        if not self.replicas or channel is None:
            return
        unaveraged = list(self.replicas.values())
        grads = [p.grad for p in parameters if any([id(p) in known for known in unaveraged])]
        if not grads:
            return
        channel.meet(call_of(doing, "with gradients that no backward has averaged"))
        if any(on_any_rank([_differ(grads, channel)], channel)):
            raise UsageError(
                f"{doing} came while gradients of backwards under no_backward_sync(), or put there by hand "
                "(torch.autograd.grad), were never synchronised: they differ between ranks, which would step "
                "apart. Let the last backward of each step run outside of it, call zero_grad() to drop them, "
                "or average them: fabric.all_reduce(p.grad)."
            )


def stamp(parameter: Tensor) -> Any:
    """Something that changes when a gradient is accumulated: in place, or as the first one."""
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)


def _differ(grads: list[Tensor | None], channel: Any) -> bool:
    """Whether ranks have other gradients, by two sums of each."""
    values = [float(each) for grad in grads for each in _sums(grad)]
    own = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=1.0)
    both = torch.cat([own, -own]).to(channel.wire.via)
    channel.collective.all_reduce(both, "max")
    return not torch.equal(both[: len(own)], -both[len(own) :])


def _sums(grad: Tensor | None) -> tuple[Any, Any]:
    if grad is None:
        return 0.0, 0.0
    dense = (grad.to_dense() if grad.is_sparse else grad).double()
    return dense.sum(), dense.abs().sum()
