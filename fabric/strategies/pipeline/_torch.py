"""Private names of torch that only pipelines use; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from typing import Any

import torch


def accumulates() -> bool:
    """Whether the running backward pass accumulates into `.grad`; `torch.autograd.grad` does not."""
    return bool(torch.autograd.Variable._execution_engine.is_checkpoint_valid())


def keeps_graph() -> bool:
    """Whether the running backward pass keeps its graph (`retain_graph=True`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def has_module_backward_hooks(module: Any) -> bool:
    """Whether `register_full_backward_hook` was called on a module."""
    return bool(module._backward_hooks)


def forward_pre_hooks(module: Any) -> list[Any]:
    """Return the forward pre-hooks of a module in the order of their calls."""
    return [*module._forward_pre_hooks.values()]


SPECTRAL_NORMS = ("SpectralNorm", "_SpectralNorm")
"""Class names of `torch.nn.utils.spectral_norm` and of its parametrization."""
