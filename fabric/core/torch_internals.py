"""Names of torch that are private: all that the package uses, each once, with what it is for.

A new torch that dropped or changed one fails `tests/unit/test_torch_internals.py`, which says what breaks.
What is imported only where it is used (FSDP2, DDP, dispatch modes) is a function here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # what all batch norms are, SyncBatchNorm too

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "BatchNorm",
    "backward_pass",
    "call_after_backward",
    "drop_workers",
    "foreach_copy_",
    "foreach_div_",
    "foreach_mul_",
    "foreach_norm",
    "loader_iterator",
    "no_subclass_functions",
    "pin_memory",
    "without_worker_info",
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


no_subclass_functions = torch._C.DisableTorchFunctionSubclass
"""Context in which operations do not ask the classes of their tensors."""


def loader_iterator() -> type:
    """What all running iterations of a DataLoader are."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    return _BaseDataLoaderIter


def drop_workers(loader: Any) -> None:
    """Let the next iteration of a DataLoader begin with new workers, also if they are persistent."""
    loader.__dict__["_iterator"] = None


def pin_memory(batch: Any) -> Any:
    """The batch in pinned memory, as a DataLoader with `pin_memory=True` does it."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)


@contextmanager
def without_worker_info() -> Iterator[None]:
    """Within, `get_worker_info()` is None, also in a DataLoader's worker."""
    from torch.utils.data._utils import worker

    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
