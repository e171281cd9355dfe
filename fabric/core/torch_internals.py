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
    "call_when_cuda_starts",
    "foreach_copy_",
    "foreach_div_",
    "foreach_mul_",
    "foreach_norm",
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


def call_when_cuda_starts(call: Callable[[], Any]) -> None:
    """Inside the call that initialises CUDA in this process; at once where that has been."""
    torch.cuda._lazy_call(call)
