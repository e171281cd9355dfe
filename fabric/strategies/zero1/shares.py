"""Owners of an optimizer's parameters, the stand-in that steps one rank's shard, and sending the results.

`ShardedStates` is made of these.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.collectives.frames import join
from fabric.core.errors import UsageError
from fabric.strategies.tensor_sync import tensor_buckets, unflatten_into
from fabric.strategies.zero1._torch import STEP_HOOKS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_IN_FLIGHT = 8  # messages: bounds the memory of packed ones


class OptimizerShard:
    """Which rank owns which parameter of one optimizer, and the step that this rank is in."""

    def __init__(self) -> None:
        self.rank = 0
        self.params: list[Tensor] = []  # each once; empty until the ranks have agreed
        self.owners: dict[Any, int] = {}
        self.handles: list[Any] = []
        self.step: ShardStep | None = None
        self.changes = self.writes = 0
        """In-place changes of all parameters at the end of the last step; those made outside of steps."""
        self.kept: list[Tensor] | None = None
        """Own parameters as they were before a step, if they were changed outside of steps."""

    def count(self) -> int:
        """Return the number of in-place changes of the parameters."""
        return sum([p._version for p in self.params])

    def count_writes(self) -> None:
        """Note what was changed since this was called, or a step ended."""
        now = self.count()
        self.writes, self.changes = self.writes + now - self.changes, now

    def keep_written(self) -> None:
        """Keep own parameters as they are before a step, if some were changed outside of steps."""
        self.kept = [p.detach().clone() for _, p in self.own()] if self.writes else None

    def is_own(self, param: Any) -> bool:
        """Whether this rank steps it; so do all where nothing is agreed on yet."""
        return self.owners.get(param, self.rank) == self.rank

    def own(self) -> list[tuple[int, Tensor]]:
        """Positions and parameters that this rank steps."""
        return [(i, p) for i, p in enumerate(self.params) if self.owners[p] == self.rank]

    def load(self) -> int:
        """Return the number of elements that this rank steps."""
        return sum([p.numel() for _, p in self.own() if p.requires_grad])

    def versions(self) -> list[int]:
        """Return the number of in-place changes of each own parameter."""
        return [p._version for _, p in self.own()]

    def drop_foreign(self, optimizer: Optimizer) -> None:
        """Forget states of what other ranks own: those made before setup, or by a load behind our back."""
        for param in [key for key in optimizer.state if not self.is_own(key)]:
            del optimizer.state[param]


class ShardStep:
    """One step of one optimizer: who stands in for it, and which parameters have gradients in it."""

    def __init__(self, share: OptimizerShard, optimizer: Optimizer) -> None:
        self.groups = [
            {**group, "params": [p for p in group["params"] if share.is_own(p)]}
            for group in optimizer.param_groups
        ]
        self.before = dict(optimizer.__dict__)
        # Hooks run in the user's optimizer, around this: in `super().step()` parameters are not sent yet.
        self.replaced: dict[str, Any] = {
            "param_groups": self.groups,
            **{name: OrderedDict() for name in STEP_HOOKS},
        }
        self.stand_in = optimizer_view(optimizer, **self.replaced)
        # Before the update: torch steps what has a gradient, and some optimizers clear it then.
        self.with_gradient = [p.grad is not None for p in share.params]

    def give_back(self, optimizer: Optimizer) -> None:
        """Copy the groups and attributes that the step has set to the user's optimizer."""
        for group, own in zip(optimizer.param_groups, self.groups, strict=False):
            group.update({**own, "params": group["params"]})
        for name, value in self.stand_in.__dict__.items():
            if name not in self.replaced and value is not self.before.get(name, self):
                optimizer.__dict__[name] = value


def optimizer_view(optimizer: Optimizer, **replaced: Any) -> Any:
    """An optimizer of the same class with the same attributes, but for those given."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({**optimizer.__dict__, **replaced})
    return twin


class RejectPartialStateDict:
    """A hook before `state_dict()` of an optimizer that has a part of the states: raises. A stand-in, by
    which the layout itself takes the states, passes.

    Args:
        optimizer: The optimizer that the user has given to setup.
        holds: What it has of the states ("this rank's share").
    """

    def __init__(self, optimizer: Optimizer, holds: str) -> None:
        self.optimizer, self.holds = weakref.ref(optimizer), holds
        self.handle = optimizer.register_state_dict_pre_hook(self)

    def __call__(self, optimizer: Optimizer) -> None:
        """Refuse.

        Raises:
            UsageError: It is the user's own optimizer.
        """
        if optimizer is self.optimizer():
            raise UsageError(
                f"{type(optimizer).__name__}.state_dict() of the optimizer that was given to fabric.setup "
                f"has only {self.holds} of the states. Call state_dict() of what fabric.setup returned, "
                'on all ranks, or write fabric.save(path, {"optimizer": optimizer}) with it.'
            )


def assign_owners(sizes: list[int], loads: list[int], holders: list[list[int]]) -> list[int]:
    """The owner of each parameter: its one holder, else the rank that has least, the largest first.

    Args:
        sizes: Elements of each parameter.
        loads: Elements that each rank has of other optimizers.
        holders: For each parameter the ranks that hold a state of it.
    """
    loads, owners = list(loads), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (len(holders[i]) != 1, -sizes[i])):
        owners[i] = holders[i][0] if len(holders[i]) == 1 else loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


def send(params: list[Tensor], share: OptimizerShard, group: Any) -> None:
    """Every owner's values of its parameters on all ranks of `group`, which must all call this."""
    by_owner: dict[int, list[Tensor]] = {}
    for param in params:
        # Detached, and not .data: a graph that saved the old values must find out, as after a plain step.
        by_owner.setdefault(share.owners[param], []).append(param.detach())
    queue = [(i, owner, p) for owner, own in by_owner.items() for i, p in enumerate(tensor_buckets(own))]
    queue.sort(key=lambda entry: entry[:2])  # owners take turns: all links are busy
    pending: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
    for _, owner, parcel in queue:
        flat = join(parcel)
        sent = dist.broadcast(flat.view(torch.uint8), group=group, group_src=owner, async_op=True)
        pending.append((sent, flat, parcel))
        if len(pending) > _IN_FLIGHT:
            _end(*pending.popleft())
    while pending:
        _end(*pending.popleft())


def _end(work: Any, flat: Tensor, parcel: list[Tensor]) -> None:
    work.wait()
    unflatten_into(flat, parcel)
