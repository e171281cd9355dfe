"""Private names of torch that several integrations use; `tests/core/test_torch_internals.py` tests each."""

from __future__ import annotations

CALL_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
"""Attributes of `nn.Module` that hold the hooks of its calls."""
