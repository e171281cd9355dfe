"""Private names of FSDP2 and DTensor; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils import _python_dispatch

from fabric.core.torch_versions import groups_of, states_hidden
from fabric.strategies._torch import fsdp_state

if TYPE_CHECKING:
    from collections.abc import Callable


no_dispatch_modes: Callable[[], Any] = _python_dispatch._disable_current_modes
"""Context in which operations are seen by no `TorchDispatchMode`."""


def dtensor_handlers() -> Any:
    """Return DTensor's table of custom handlers by operation, or None in a torch without it."""
    from torch.distributed.tensor import DTensor

    return getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)


def view_of(tensor: Any, base: Any) -> Any:
    """Return the view of `base` that `tensor` is of its own base, which has the same shape."""
    return tensor._view_func_unsafe(base)


def assign_shards(tensor: Any, other: Any) -> None:
    """Give a DTensor the shards and the placements of another one."""
    tensor._local_tensor, tensor._spec = other._local_tensor, other._spec


def fsdp_states(root: Any) -> list[Any]:
    """Return FSDP2's states of all modules below a root. They exist once the root is initialised."""
    return [*fsdp_state(root)._state_ctx.all_states]


def fsdp_groups(states: list[Any]) -> list[Any]:
    """Return the groups of parameters that are gathered together."""
    return [group for state in states for group in groups_of(state)]


def begin_fsdp(root: Any) -> None:
    """Make this module the root of all groups in it that have none. Otherwise the first forward does it."""
    state = fsdp_state(root)
    with states_hidden(state, lambda held: held is not state and held._is_root is not None):
        state._lazy_init()


def set_frozen_group_dtypes(root: Any) -> None:
    """Let frozen groups reduce gradients in their parameters' dtype once unfrozen, as torch 2.14 does."""
    for group in fsdp_groups(fsdp_states(root)):
        if getattr(group, "_orig_dtype", group) is None and group.fsdp_params:
            first = group.fsdp_params[0]
            group._orig_dtype, group._reduce_dtype = first.orig_dtype, first.reduce_dtype


def phase(held: Any) -> str:
    """Return the phase of a state or group: "IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"."""
    return str(held._training_state.name)


def in_forward(state: Any) -> bool:
    """Whether a forward of the model runs or has failed."""
    return state._state_ctx.iter_forward_root is not None


def is_prefetched(group: Any) -> bool:
    """Whether an all-gather of the group was prefetched for a forward that has not reached it."""
    return group._all_gather_result is not None


def keep_unsharded(module: Any) -> None:
    """Keep the module's group gathered after a forward, a backward or a state dict."""
    module.set_reshard_after_forward(False, recurse=False)
    module.set_reshard_after_backward(False, recurse=False)
    for group in fsdp_groups([fsdp_state(module)]):
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()


def unsharded_of(part: Any) -> Any:
    """Return the unsharded parameter, whose memory may be freed, or None if it was never unsharded."""
    return getattr(part, "_unsharded_param", None)


def unshard_root(state: Any, root: Any) -> None:
    """Run FSDP2's pre-forward of the root module."""
    state._pre_forward(root, (), {})


def reshard_root(state: Any, root: Any, out: Any) -> Any:
    """Run FSDP2's post-forward of the root module. Return `out`; a backward of it gathers again."""
    return state._post_forward(root, (), out)


def reduce_in_place(root: Any, reduce: Callable[..., None]) -> None:
    """Replace the reduction of each group of a model by `reduce(torch's reduction, group, its number)`."""
    for number, group in enumerate(fsdp_groups(fsdp_states(root))):
        group.post_backward = partial(reduce, group.post_backward, group, number)


def has_hooks(parameter: Any) -> bool:
    """Whether a parameter has hooks on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def finish_backward(state: Any) -> None:
    """Run FSDP2's end of a backward, given the root's state: reduce the groups that are still unsharded.

    torch runs it by hooks on outputs. Outputs that torch does not find have no such hooks.
    """
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        state._state_ctx.manual_backward_finalization_active = False  # torch 2.15: the hooks choose a mode
    state._root_post_backward_final_callback()


def register_pre_backward_in_place(state: Any, hook: Callable[[Any], Any]) -> None:
    """Replace the function by which FSDP2 registers its pre-backward hooks on outputs."""
    state._register_pre_backward_hook = hook


def register_pre_backward(state: Any, out: Any) -> Any:
    """Register FSDP2's pre-backward hooks on `out`; they gather the group."""
    return type(state)._register_pre_backward_hook(state, out)


POLICY_METHOD = "_run_policy"
"""Method of the policies of torch.distributed.fsdp.wrap, called with (model, ignored modules, settings)."""
