"""Private names of torch that several strategies use; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def call_after_backward(call: Callable[[], Any]) -> None:
    """Call `call` at the end of the running backward pass, which raises its errors."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def has_forward_hooks(module: Any) -> bool:
    """Whether a module has forward hooks or forward pre-hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


value_of: Any = torch.ops.aten._local_scalar_dense.default
"""The operation behind `tensor.item()`."""

FSDP_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes that `fully_shard` sets on modules; `generate` of transformers detects FSDP by them."""

STATE_KEYS = "__composable_api_state_key"
"""Beginning of the names under which `fully_shard` keeps its states in the attributes of a module."""

fsdp_state = methodcaller("_get_fsdp_state")
"""Return FSDP2's state of a module that `fully_shard` was called on."""


def computes_in(root: Any) -> torch.dtype | None:
    """Return the dtype in which FSDP2 gathers a module's parameters, or None for their own."""
    dtype: torch.dtype | None = fsdp_state(root)._mp_policy.param_dtype
    return dtype
