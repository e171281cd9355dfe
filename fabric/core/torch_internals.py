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
    "COUNTED_STEP",
    "MODULE_TABLES",
    "STEPPED",
    "BatchNorm",
    "backward_pass",
    "call_after_backward",
    "foreach_copy_",
    "foreach_div_",
    "foreach_mul_",
    "foreach_norm",
    "is_custom_function_input",
    "will_run",
]

foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread, the innermost one; -1: none. Numbers grow."""


def call_after_backward(call: Callable[[], Any]) -> None:
    """At the end of the backward pass that runs now; an error of `call` is the pass's."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


COUNTED_STEP, STEPPED = "_wrapped_by_lr_sched", "_opt_called"
"""What a learning rate scheduler puts on its optimizer's `step`, and on the optimizer once that was called:
without it the scheduler warns when it is stepped.
"""

MODULE_TABLES = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""What an `nn.Module` holds beside its children: a wrapper that shares these is its module to torch."""

will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward pass that runs now comes to a node of the graph. Raises RuntimeError for a node whose
gradient is what `torch.autograd.grad` was asked for.
"""


def is_custom_function_input(tensor: torch.Tensor) -> bool:
    """Whether a view is an input that a custom autograd function passed on: its base is none of its own."""
    kinds = torch._C._autograd.CreationMeta
    return bool(torch._C._autograd._get_creation_meta(tensor) == kinds.IN_CUSTOM_FUNCTION)
