"""Names of torch that are private: all that the package uses, each once, with what it is for.

A new torch that dropped or changed one fails `tests/unit/test_torch_internals.py`, which says what breaks.
What is imported only where it is used (FSDP2, DDP, dispatch modes) is a function here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._utils import _flatten_dense_tensors as flatten_tensors  # torch.cat of the flat tensors, in C++
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # what all batch norms are, SyncBatchNorm too

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "COUNTED_STEP",
    "MODULE_TABLES",
    "STEPPED",
    "BatchNorm",
    "accumulates",
    "backward_pass",
    "call_after_backward",
    "call_when_cuda_starts",
    "drop_workers",
    "dtensor_handlers",
    "flatten_tensors",
    "foreach_clamp_max_",
    "foreach_clamp_min_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_mul_",
    "foreach_norm",
    "fsdp_groups",
    "fsdp_state",
    "fsdp_states",
    "groups_inside",
    "in_function_transform",
    "is_custom_function_input",
    "is_fsdp",
    "loader_iterator",
    "memory_of",
    "no_subclass_functions",
    "packs_saved_tensors",
    "pin_memory",
    "ungathered",
    "will_run",
    "without_worker_info",
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


def groups_inside(module: Any) -> list[Any]:
    """torch's states of what `fully_shard` was called on inside of a module (not of itself), each once."""
    states = {
        id(state := inner._get_fsdp_state()): state
        for inner in module.modules()
        if inner is not module and hasattr(inner, "_get_fsdp_state")
    }
    return [state for state in states.values() if not any([held is module for held in state._modules])]


@contextmanager
def ungathered(states: list[Any]) -> Iterator[torch.dtype | None]:
    """Context in which calls of such groups gather nothing, free nothing, and are not noted.

    Gives the dtype in which parameters compute; None: their own.

    torch takes them for calls of a backward, and their parameters to be there.
    """
    groups = [group for state in states for group in state._fsdp_param_groups]
    held = [(state, "_training_state") for state in states] + [(group, "_sharded_state") for group in groups]
    before = [getattr(holder, name) for holder, name in held]
    for (holder, name), value in zip(held, before, strict=True):
        setattr(
            holder, name, type(value).PRE_BACKWARD if name == "_training_state" else type(value).UNSHARDED
        )
    try:
        yield states[0]._mp_policy.param_dtype if states else None
    finally:
        for (holder, name), value in zip(held, before, strict=True):
            setattr(holder, name, value)


def packs_saved_tensors() -> bool:
    """Whether hooks on saved tensors are on, as of activations that are computed again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def accumulates() -> bool:
    """Whether the backward pass that runs now adds to all `.grad` it comes to: not so in autograd.grad."""
    valid: bool = torch.autograd.Variable._execution_engine.is_checkpoint_valid()
    return valid


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


def call_when_cuda_starts(call: Callable[[], Any]) -> None:
    """Inside the call that initialises CUDA in this process; at once where that has been."""
    torch.cuda._lazy_call(call)


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
