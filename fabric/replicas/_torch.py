"""Private names of torch that the replica check uses; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from typing import Any

from torch.utils import _python_dispatch

is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
"""Whether a tensor consists of inner tensors that `__tensor_flatten__` names, as quantised ones do."""


def loss_scale(scaler: Any) -> Any:
    """Return the scale of a `torch.amp.GradScaler` as a tensor, or None before its first use."""
    return getattr(scaler, "_scale", None)


def has_backward_hooks(tensor: Any) -> bool:
    """Whether `register_hook` was called on a tensor."""
    return bool(tensor._backward_hooks)
