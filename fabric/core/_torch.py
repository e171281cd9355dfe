"""Private names of torch that several folders use, or that every run imports.

`tests/core/test_torch_internals.py` tests each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import _utils as torch_utils
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The classes of all batch norms, for `isinstance`; torch's common base class is private."""

flatten_tensors: Callable[[Any], torch.Tensor] = torch_utils._flatten_dense_tensors
"""Return the concatenation of the flattened tensors; one call into C++."""

foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

in_function_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func (grad, vmap, ...) is active."""

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the innermost backward pass that runs in this thread, or -1. Numbers grow."""

MODULE_TABLES = (
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes of `nn.Module` that a wrapper shares with its module, so that torch treats both equally."""

will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running backward pass executes a node of the graph. It raises RuntimeError for a node whose
gradient `torch.autograd.grad` returns."""

INIT_FILLS = ("_no_grad_uniform_", "_no_grad_normal_", "_no_grad_fill_", "_no_grad_zero_")
"""Functions of one operation by which functions of `torch.nn.init` (xavier_uniform_, ones_) fill a tensor."""

no_subclass_functions = torch._C.DisableTorchFunctionSubclass
"""Context in which operations do not call `__torch_function__` of their tensors."""


def is_custom_function_input(tensor: torch.Tensor) -> bool:
    """Whether a view is an input that a custom autograd function returned; its base is then unrelated."""
    kinds = torch._C._autograd.CreationMeta
    return bool(torch._C._autograd._get_creation_meta(tensor) == kinds.IN_CUSTOM_FUNCTION)


def before_clips(call: Callable[[list[torch.Tensor]], None]) -> None:
    """Patch torch so that `clip_grad_norm_` and the other clips call `call(gradients)` first."""
    from torch.nn.utils import clip_grad

    grouped = clip_grad._group_tensors_by_device_and_dtype

    def grouped_after_call(lists: list[Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            call(lists[0])
        return grouped(lists, *args, **kwargs)

    name = "_group_tensors_by_device_and_dtype"  # setattr: its type annotation is too narrow for mypy
    setattr(clip_grad, name, grouped_after_call)


def node_number(node: Any) -> int:
    """Return the number of a node of a graph, by which it is known while Python has no reference to it."""
    number: int = node._sequence_nr()
    return number


UNUSED = "not have been used in the graph"
"""Part of the error of `torch.autograd.grad` for inputs without a gradient."""


def after_grads(call: Callable[[tuple[Any, ...], tuple[Any, ...]], None]) -> None:
    """Patch torch so that `torch.autograd.grad`, by whatever name the loop imported it, calls
    `call(inputs, grads)` last; also before torch's error for inputs without a gradient, which are None then.
    """
    namespace: Any = torch.autograd
    run = namespace._engine_run_backward

    def run_before_call(outputs: Any, *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        try:
            grads = run(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
        except RuntimeError as error:
            if not accumulate_grad and UNUSED in str(error):
                call(args[3], (None,) * len(args[3]))
            raise
        if not accumulate_grad and not torch.compiler.is_compiling():
            call(args[3], grads)
        return grads

    namespace._engine_run_backward = run_before_call


def memory_of(tensor: Any) -> int:
    """Return an identifier of a tensor's storage (of a DTensor's local tensor), also on the meta device."""
    return id(getattr(tensor, "_local_tensor", tensor).untyped_storage())  # one object as long as it lives


def is_fsdp(module: Any) -> bool:
    """Whether `fully_shard` was called on the module. Does not import FSDP2."""
    return hasattr(module, "_get_fsdp_state")


def is_underway(iteration: Any) -> bool:
    """Whether an iteration of a DataLoader has yielded a batch and has more."""
    return bool(0 < iteration._num_yielded < len(iteration))


def tensor_of(ref: Any) -> Any:
    """Return the tensor of a weak reference, or None. torch 2.9 could lose its Python object otherwise."""
    tensor = ref()
    getattr(tensor, "_fix_weakref", bool)()
    return tensor


def base_of(tensor: Any) -> Any:
    """Return the tensor that another one is a view of, or None."""
    return tensor._base if tensor._is_view() else None
