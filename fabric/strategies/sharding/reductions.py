"""`record_reductions`: ranks that reduce different gradients raise at the step, and mix up no messages.

FSDP2 reduces those gradients of a group that the backward has computed, as one message. After a branch ranks
would send messages of different sizes, which ends a process of gloo, or would add gradients of different
parameters, which nothing reports. So a group with some gradients sends zeros for the rest of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from fabric.strategies.sharding._torch import has_hooks, reduce_in_place, unsharded_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def record_reductions(root: Any, layout: Any) -> None:
    """Record each reduction of the groups of a model in the layout; a step compares the record."""
    reduce_in_place(root, partial(_reduce, layout=layout))


def fill(wholes: Iterable[Any]) -> None:
    """Set the gradients of gathered parameters to zeros."""
    for whole in wholes:
        # In torch 2.15 the gradients of half-precision copies have the parameters' own dtype.
        whole.grad = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None))


def _reduce(reduce: Callable[[], None], group: Any, number: int, layout: Any) -> None:
    gathered = [(part, unsharded_of(part)) for part in group.fsdp_params]
    trained = [(part, whole) for part, whole in gathered if whole is not None and whole.requires_grad]
    has_grad = [
        whole.grad is not None or part.unsharded_accumulated_grad is not None for part, whole in trained
    ]
    if not any(has_grad) or not group.reduce_grads:  # torch's set_requires_gradient_sync(False)
        reduce()
        return
    layout.passed = crc32(f"group {number}".encode() + bytes(has_grad), layout.passed)
    left_out = [
        (p.sharded_param, whole) for (p, whole), has in zip(trained, has_grad, strict=True) if not has
    ]
    layout.left_out.update({id(shard): None for shard, _ in left_out})
    # A hook on the gradient would get zeros. A gradient that no rank has stays None: momentum would move it.
    zeros = [(shard, whole) for shard, whole in left_out if not has_hooks(shard)]
    fill([whole for _, whole in zeros])
    new = [shard for shard, _ in zeros if shard.grad is None]
    reduce()
    for shard in new:
        shard.grad = None
