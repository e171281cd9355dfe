"""Private names of torch that only context parallelism uses; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.core._torch import is_fsdp
from fabric.strategies._torch import fsdp_state
from fabric.strategies.sharding._torch import fsdp_groups

if TYPE_CHECKING:
    from collections.abc import Iterator


def groups_inside(module: Any) -> list[Any]:
    """Return FSDP2's states of the modules inside a module, without its own state, each once."""
    inside = [inner for inner in module.modules() if inner is not module and is_fsdp(inner)]
    states = {id(state := fsdp_state(inner)): state for inner in inside}
    return [state for state in states.values() if not any([held is module for held in state._modules])]


@contextmanager
def without_unshard(states: list[Any]) -> Iterator[torch.dtype | None]:
    """Context in which calls of modules with these states unshard and reshard no parameters.

    Yields the compute dtype of parameters, or None for their own. torch treats the calls as part of a
    backward whose parameters are unsharded.
    """
    groups = fsdp_groups(states)
    held = [(state, "_training_state") for state in states] + [(group, "_sharded_state") for group in groups]
    before = [getattr(holder, name) for holder, name in held]
    for (holder, name), value in zip(held, before, strict=True):
        asked = "PRE_BACKWARD" if name == "_training_state" else "UNSHARDED"
        setattr(holder, name, type(value)[asked])
    try:
        yield states[0]._mp_policy.param_dtype if states else None
    finally:
        for (holder, name), value in zip(held, before, strict=True):
            setattr(holder, name, value)


def packs_saved_tensors() -> bool:
    """Whether hooks on saved tensors are active, as in activation checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
