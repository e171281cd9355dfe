"""Names of torch that are private: all that the package uses, each once, with what it is for.

A new torch that dropped or changed one fails `tests/unit/test_torch_internals.py`, which says what breaks.
What is imported only where it is used (FSDP2, DDP, dispatch modes) is a function here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # what all batch norms are, SyncBatchNorm too

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BatchNorm",
    "backward_pass",
    "call_after_backward",
    "dtensor_handlers",
    "foreach_clamp_max_",
    "foreach_clamp_min_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_mul_",
    "foreach_norm",
    "fsdp_groups",
    "fsdp_state",
    "fsdp_states",
    "in_function_transform",
    "is_fsdp",
    "memory_of",
]

foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread, the innermost one; -1: none. Numbers grow."""

in_function_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether torch.func (grad, vmap, ...) transforms what runs now."""


def call_after_backward(call: Callable[[], Any]) -> None:
    """At the end of the backward pass that runs now; an error of `call` is the pass's."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def dtensor_handlers() -> Any:
    """What DTensor does for single operations in place of its own ways, by operation; None: no such thing."""
    from torch.distributed.tensor import DTensor

    return getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)


def memory_of(tensor: Any) -> int:
    """A number of the memory that a tensor (a DTensor: this rank's part) views, on the meta device, too."""
    key: int = getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata
    return key


def is_fsdp(module: Any) -> bool:
    """Whether `fully_shard` was called on the module; asked without importing it."""
    return hasattr(module, "_get_fsdp_state")


def fsdp_state(module: Any) -> Any:
    """What FSDP2 knows of a module that `fully_shard` was called on."""
    return module._get_fsdp_state()


def fsdp_states(root: Any) -> list[Any]:
    """The same of all modules of a model, by its outermost one; there once its forward is set up."""
    states: list[Any] = fsdp_state(root)._state_ctx.all_states
    return states


def fsdp_groups(states: list[Any]) -> list[Any]:
    """The groups of parameters that are gathered together."""
    return [group for state in states for group in state._fsdp_param_groups]
