"""Owners of an optimizer's parameters, the view that steps one rank's shard, and the broadcast after it.

Used by `ShardedStates`.
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
    """The owners of one optimizer's parameters, and its running step."""

    def __init__(self) -> None:
        self.rank = 0
        self.params: list[Tensor] = []  # each once; empty until owners are assigned
        self.owners: dict[Any, int] = {}
        self.handles: list[Any] = []
        self.step: ShardStep | None = None
        self.changes = self.writes = 0
        """In-place changes of parameters: `changes` until the end of the last step, `writes` outside steps.
        """
        self.replaced = 0
        """Steps with gradients that no backward has averaged; compared at the 1st, 2nd, 4th, 8th, ... one."""
        self.before_step: list[Tensor] | None = None
        """Local parameters before the running step, if parameters were changed outside of steps."""

    def count(self) -> int:
        """Return the number of in-place changes of the parameters."""
        return sum([p._version for p in self.params])

    def count_writes(self) -> None:
        """Add the in-place changes since the last call, or since the end of a step, to `writes`."""
        count = self.count()
        self.writes, self.changes = self.writes + count - self.changes, count

    def save_before_step(self) -> None:
        """Copy local parameters before a step, if parameters were changed outside of steps."""
        self.before_step = [p.detach().clone() for _, p in self.local()] if self.writes else None

    def is_local(self, param: Any) -> bool:
        """Whether this rank owns the parameter; True on all ranks until owners are assigned."""
        return self.owners.get(param, self.rank) == self.rank

    def local(self) -> list[tuple[int, Tensor]]:
        """Return (index, parameter) of the parameters that this rank owns."""
        return [(i, p) for i, p in enumerate(self.params) if self.owners[p] == self.rank]

    def num_elements(self) -> int:
        """Return the number of trainable elements that this rank owns."""
        return sum([p.numel() for _, p in self.local() if p.requires_grad])

    def versions(self) -> list[int]:
        """Return the version counter of each local parameter."""
        return [p._version for _, p in self.local()]

    def drop_others_state(self, optimizer: Optimizer) -> None:
        """Delete states of other ranks' parameters, from before setup or from torch's load_state_dict."""
        for param in [key for key in optimizer.state if not self.is_local(key)]:
            del optimizer.state[param]


class ShardStep:
    """One step of one optimizer: the view that steps, and which parameters have gradients."""

    def __init__(self, shard: OptimizerShard, optimizer: Optimizer) -> None:
        self.groups = [
            {**group, "params": [p for p in group["params"] if shard.is_local(p)]}
            for group in optimizer.param_groups
        ]
        self.before = dict(optimizer.__dict__)
        # The view has no step hooks: they run in the user's optimizer, after the broadcast.
        self.replaced: dict[str, Any] = {
            "param_groups": self.groups,
            **{name: OrderedDict() for name in STEP_HOOKS},
        }
        self.view = optimizer_view(optimizer, **self.replaced)
        # Computed before the update, since some optimizers clear gradients in their step.
        self.has_grad = [p.grad is not None for p in shard.params]

    def write_back(self, optimizer: Optimizer) -> None:
        """Copy groups and attributes that the step changed from the view to the user's optimizer."""
        for group, stepped in zip(optimizer.param_groups, self.groups, strict=False):
            group.update({**stepped, "params": group["params"]})
        for name, value in self.view.__dict__.items():
            if name not in self.replaced and value is not self.before.get(name, self):
                optimizer.__dict__[name] = value


def optimizer_view(optimizer: Optimizer, **replaced: Any) -> Any:
    """Return an optimizer of the same class with the same attributes, except `replaced`."""
    view = object.__new__(type(optimizer))
    view.__dict__.update({**optimizer.__dict__, **replaced})
    return view


class RejectPartialStateDict:
    """A hook that raises in `state_dict()` of an optimizer that has only a part of the states. It does not
    raise for views, from which the layout reads states.

    Args:
        optimizer: The optimizer that the user passed to setup.
        holds: The part of the states that it has ("this rank's shard"), for the error.
    """

    def __init__(self, optimizer: Optimizer, holds: str) -> None:
        self.optimizer, self.holds = weakref.ref(optimizer), holds
        self.handle = optimizer.register_state_dict_pre_hook(self)

    def __call__(self, optimizer: Optimizer) -> None:
        """Raise if `optimizer` is the user's.

        Raises:
            UsageError: It is the user's optimizer, not a view.
        """
        if optimizer is self.optimizer():
            raise UsageError(
                f"{type(optimizer).__name__}.state_dict() of the optimizer that was passed to fabric.setup "
                f"has only {self.holds} of the states. Call state_dict() of the optimizer that fabric.setup "
                'returned, on all ranks, or write fabric.save(path, {"optimizer": optimizer}) with it.'
            )


def assign_owners(sizes: list[int], loads: list[int], holders: list[list[int]]) -> list[int]:
    """Return the owner of each parameter: its only holder, else the rank with the fewest elements.

    Parameters are assigned from the largest to the smallest.

    Args:
        sizes: Number of elements of each parameter.
        loads: Number of elements that each rank owns in other optimizers.
        holders: For each parameter the ranks that have a state of it.
    """
    loads, owners = list(loads), [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (len(holders[i]) != 1, -sizes[i])):
        owners[i] = holders[i][0] if len(holders[i]) == 1 else loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


def broadcast_from_owners(params: list[Tensor], shard: OptimizerShard, group: Any) -> None:
    """Broadcast each parameter from its owner. All ranks of `group` must call this."""
    by_owner: dict[int, list[Tensor]] = {}
    for param in params:
        # Detached, not .data: it shares the version counter, so that a backward with old values raises.
        by_owner.setdefault(shard.owners[param], []).append(param.detach())
    queue = [(i, owner, b) for owner, owned in by_owner.items() for i, b in enumerate(tensor_buckets(owned))]
    queue.sort(key=lambda entry: entry[:2])  # owners alternate, so that all links are used
    pending: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
    for _, owner, bucket in queue:
        flat = join(bucket)
        sent = dist.broadcast(flat.view(torch.uint8), group=group, group_src=owner, async_op=True)
        pending.append((sent, flat, bucket))
        if len(pending) > _IN_FLIGHT:
            _wait_and_copy(*pending.popleft())
    while pending:
        _wait_and_copy(*pending.popleft())


def _wait_and_copy(work: Any, flat: Tensor, bucket: list[Tensor]) -> None:
    work.wait()
    unflatten_into(flat, bucket)
