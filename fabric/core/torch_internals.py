"""Names of torch that are private: all that the package uses, each once, with what it is for.

A new torch that dropped or changed one fails `tests/unit/test_torch_internals.py`, which says what breaks.
What is imported only where it is used (FSDP2, DDP, dispatch modes) is a function here.
"""

from __future__ import annotations

import pickle
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import _utils as torch_utils
from torch import nn

from fabric.core.torch_versions import groups_of, states_hidden
from fabric.core.tree import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""In the place of torch's private class of all batch norms: for `isinstance`."""

Dropout = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Likewise, of all dropouts."""

flatten_tensors: Callable[[Any], torch.Tensor] = torch_utils._flatten_dense_tensors
"""torch.cat of the flat tensors, in C++."""

foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread, the innermost one; -1: none. Numbers grow."""

running_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of the graph that the backward pass in this thread is at; None: there is none."""


def accumulator_of(parameter: torch.Tensor) -> Any:
    """The node that writes a parameter's gradient; it has another one after a change of dtype or device."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


def tensor_of(ref: Any) -> Any:
    """The tensor of a weak reference, or None. torch 2.9 has to be told, or the object may be lost."""
    tensor = ref()
    getattr(tensor, "_fix_weakref", bool)()
    return tensor


in_function_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether torch.func (grad, vmap, ...) transforms what runs now."""


def before_clips(call: Callable[[list[torch.Tensor]], None]) -> None:
    """From now on call `call(gradients)` where torch's `clip_grad_norm_` and its siblings begin."""
    from torch.nn.utils import clip_grad

    grouped = clip_grad._group_tensors_by_device_and_dtype

    def looked_at(lists: list[Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            call(lists[0])
        return grouped(lists, *args, **kwargs)

    name = "_group_tensors_by_device_and_dtype"  # typed more narrowly than it is called
    setattr(clip_grad, name, looked_at)


def call_after_backward(call: Callable[[], Any]) -> None:
    """At the end of the backward pass that runs now; an error of `call` is the pass's."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


COUNTED_STEP, STEPPED = "_wrapped_by_lr_sched", "_opt_called"
"""What a scheduler puts on its optimizer's `step`, and on the optimizer once stepped: else it warns."""

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
"""What an `nn.Module` holds: a wrapper that shares these is its module to torch."""

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
"""What an `nn.Module` holds of the hooks around its calls."""

will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward pass that runs now comes to a node of the graph. A RuntimeError says that the node's
gradient is what `torch.autograd.grad` was asked for."""


def is_custom_function_input(tensor: torch.Tensor) -> bool:
    """Whether a view is an input that a custom autograd function passed on: its base is none of its own."""
    kinds = torch._C._autograd.CreationMeta
    return bool(torch._C._autograd._get_creation_meta(tensor) == kinds.IN_CUSTOM_FUNCTION)


def groups_inside(module: Any) -> list[Any]:
    """torch's states of what `fully_shard` was called on inside of a module (not of itself), each once."""
    inside = [inner for inner in module.modules() if inner is not module and is_fsdp(inner)]
    states = {id(state := fsdp_state(inner)): state for inner in inside}
    return [state for state in states.values() if not any([held is module for held in state._modules])]


@contextmanager
def ungathered(states: list[Any]) -> Iterator[torch.dtype | None]:
    """Context in which calls of such groups gather nothing, free nothing, and are not noted.

    Gives the dtype in which parameters compute (None: their own). torch takes such calls for those of a
    backward, and their parameters to be there.
    """
    groups = fsdp_groups(states)
    held = [(state, "_training_state") for state in states] + [(group, "_sharded_state") for group in groups]
    before = [getattr(holder, name) for holder, name in held]
    for (holder, name), value in zip(held, before, strict=True):
        asked = "PRE_BACKWARD" if name == "_training_state" else "UNSHARDED"
        setattr(holder, name, type(value)[asked])
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
    return bool(torch.autograd.Variable._execution_engine.is_checkpoint_valid())


def keeps_graph() -> bool:
    """Whether the graph outlives the backward pass that runs now: `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def dtensor_handlers() -> Any:
    """What DTensor does for single operations in place of its own ways, by operation; None: no such thing."""
    from torch.distributed.tensor import DTensor

    return getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)


value_of: Any = torch.ops.aten._local_scalar_dense.default
"""The operation behind `tensor.item()`."""


def memory_of(tensor: Any) -> int:
    """A number of the memory that a tensor (a DTensor: this rank's part) views, on the meta device, too."""
    return id(getattr(tensor, "_local_tensor", tensor).untyped_storage())  # one object as long as it lives


def leave_out_of_ddp(module: Any, names: list[str]) -> None:
    """Let DDP neither send nor look at these parameters and buffers of a module that it gets later."""
    module._ddp_params_and_buffers_to_ignore = names


def place_in_file(name: str, offset: int, length: int) -> Any:
    """Where `torch.distributed.checkpoint` finds a value in the files of a checkpoint."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)


FSDP_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""What `fully_shard` leaves on modules; by it `generate` of transformers meets other ranks."""


def is_fsdp(module: Any) -> bool:
    """Whether `fully_shard` was called on the module; asked without importing it."""
    return hasattr(module, "_get_fsdp_state")


fsdp_state = methodcaller("_get_fsdp_state")
"""What FSDP2 knows of a module that `fully_shard` was called on."""


def fsdp_states(root: Any) -> list[Any]:
    """The same of all modules of a model, by its outermost one; there once its forward is set up."""
    return [*fsdp_state(root)._state_ctx.all_states]


def fsdp_root(module: Any) -> Any:
    """The outermost module of the groups that this one belongs to; None where it is not known yet."""
    return next((state._modules[0] for state in fsdp_states(module)), None)


def fsdp_groups(states: list[Any]) -> list[Any]:
    """The groups of parameters that are gathered together."""
    return [group for state in states for group in groups_of(state)]


no_subclass_functions = torch._C.DisableTorchFunctionSubclass
"""Context in which operations do not ask the classes of their tensors."""

no_subclass_dispatch = torch._C._DisableTorchDispatch
"""The same further down, where operations are those of ATen."""


def written_by(operation: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Which of its tensors an operation of ATen changes."""
    found: list[Any] = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in flatten(found)[0] if isinstance(leaf, torch.Tensor)]


def goes_on(iteration: Any) -> bool:
    """Whether a DataLoader's iteration has given a batch and has more; it may be kept for its workers."""
    return bool(0 < iteration._num_yielded < len(iteration))


# DistributedDataParallel: one reducer for each replica. Without frames, since each backward calls them.

check_reduced = methodcaller("_check_reducer_finalized")
"""Raises RuntimeError, which names parameters, if a replica's reducer still waits for gradients."""

disarm = methodcaller("_reset_state")
"""Let a reducer wait for no gradient."""

has_built_buckets = attrgetter("_has_rebuilt_buckets")
"""Whether a reducer has ordered its buckets; disarmed before, it would in a later forward, perhaps alone."""


def build_buckets(replica: Any) -> None:
    """Let its reducer do so now. All ranks."""
    replica._has_rebuilt_buckets = replica.reducer._rebuild_buckets()


def renew_reducer(replica: Any, trained: list[torch.nn.Parameter]) -> None:
    """A new reducer, with memory of its own, for a replica whose pass failed.

    Reductions that the old one has begun end later, in memory that nothing reads any more.
    """
    group = replica.process_group
    frozen = [p for p in trained if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)  # the reducer is to know what it knew at setup
    replica.reducer._remove_autograd_hooks()  # what torch.compile has made of the model may keep it
    replica.process_group = torch.distributed.group.WORLD  # torch refuses the state of a replica of another
    replica.__setstate__(replica.__getstate__())
    for parameter in frozen:
        parameter.requires_grad_(False)
    replica._has_rebuilt_buckets = False
    if group is not replica.process_group:
        replica.process_group = group
        replica.reducer._update_process_group(group)
    hook_again(replica)


def leave_out(replica: Any, elsewhere: set[Any], trained: list[torch.nn.Parameter]) -> None:
    """Let a replica reduce `trained`, and leave out what is reduced `elsewhere`, beside what its user leaves
    out.
    """
    replica.require_backward_grad_sync = bool(trained)
    if not trained:  # with a reducer, since copies make theirs of the same parameters, and need some
        replica.reducer._remove_autograd_hooks()
        elsewhere = set()
    users = replica.__dict__.setdefault("_fabric_ignored", {*replica.parameters_to_ignore})
    parts = replica.module.named_modules()
    # The reducer's names: ".weight" for a parameter of the outermost module.
    names = [f"{path}.{n}" for path, part in parts for n, p in part._parameters.items() if p in elsewhere]
    ignored = {*users, *names}
    before, replica.parameters_to_ignore = replica.parameters_to_ignore, ignored
    if before != ignored and trained:
        renew_reducer(replica, trained)


def hook_again(replica: Any) -> None:
    """Give the communication hook of a replica to its reducer, which is a new one."""
    hooks, replica._comm_hooks = replica._comm_hooks, []
    for hook, state in hooks:
        replica.register_comm_hook(state, hook)


# FSDP2: a state for each module that `fully_shard` was called on, groups of parts, and parts.


def begin_fsdp(root: Any) -> None:
    """Make this module the root of all groups in it that have none, as else the first forward does."""
    state = fsdp_state(root)
    with states_hidden(state, lambda held: held is not state and held._is_root is not None):
        state._lazy_init()


def expect_thawed(root: Any) -> None:
    """A group that is frozen now gets gradients of its parameters' dtype, too, once it is thawed; torch 2.14
    does so itself."""
    for group in fsdp_groups(fsdp_states(root)):
        if getattr(group, "_orig_dtype", group) is None and group.fsdp_params:
            first = group.fsdp_params[0]
            group._orig_dtype, group._reduce_dtype = first.orig_dtype, first.reduce_dtype


def computes_in(root: Any) -> torch.dtype | None:
    """The dtype in which a module's parameters are gathered; None: their own."""
    dtype: torch.dtype | None = fsdp_state(root)._mp_policy.param_dtype
    return dtype


def phase(held: Any) -> str:
    """Where a state or a group is: "IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"."""
    return str(held._training_state.name)


def in_forward(state: Any) -> bool:
    """Whether a forward of the model runs, or one has failed."""
    return state._state_ctx.iter_forward_root is not None


def is_gathered_ahead(group: Any) -> bool:
    """Whether the group is on its way, for a forward that has not come to it."""
    return group._all_gather_result is not None


owner_of = attrgetter("_module_info")
"""Whose parameter a part is: `module`, `param_name`, and the `shared_modules` that have it, too."""


def show_part(part: Any) -> None:
    """Put this rank's part in the parameter's places; what is gathered stays."""
    part._setattr_on_modules(part.sharded_param)


def stay_gathered(state: Any) -> None:
    """From now on a forward, a backward or a state dict of the module frees none of its group."""
    module = state._modules[0]
    module.set_reshard_after_forward(False, recurse=False)
    module.set_reshard_after_backward(False, recurse=False)
    for group in fsdp_groups([state]):
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()


def whole_of(part: Any) -> Any:
    """The gathered parameter, or its empty memory; None: it was never gathered."""
    return getattr(part, "_unsharded_param", None)


def gather_root(state: Any, root: Any) -> None:
    """Do what torch does before a forward of the root module."""
    state._pre_forward(root, (), {})


def free_root(state: Any, root: Any, out: Any) -> Any:
    """Do what torch does after it; return `out`, from which a backward gathers again."""
    return state._post_forward(root, (), out)


def finish_backward(state: Any) -> None:
    """What torch does at the end of a backward through a model, by its root's state: it reduces what is still
    whole. Hooks on outputs ask for it, which hidden outputs do not have.
    """
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        state._state_ctx.manual_backward_finalization_active = False  # torch 2.15: the hooks choose a mode
    state._root_post_backward_final_callback()


def reduce_in_place(root: Any, reduce: Callable[..., None]) -> None:
    """From now on a group of the model reduces by `reduce(reduction of torch's, its parts)`."""
    for group in fsdp_groups(fsdp_states(root)):
        group.post_backward = partial(reduce, group.post_backward, group.fsdp_params)


def hang_in_place(state: Any, hang: Callable[[Any], Any]) -> None:
    """From now on a forward gives its output to `hang` in place of torch's `hang`."""
    state._register_pre_backward_hook = hang


def hang(state: Any, out: Any) -> Any:
    """Let a backward that comes to tensors of `out` gather the group first."""
    return type(state)._register_pre_backward_hook(state, out)


# Modules, parameters, process groups.


def has_hooks(parameter: Any) -> bool:
    """Whether something is to be done with its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def group_names() -> list[str]:
    """torch's names of the process groups that this process is in."""
    return [*torch.distributed.distributed_c10d._world.pg_names.values()]


def group_timeout(group: Any, device_type: str) -> Any:
    """How long the collectives of a group wait for a rank; None: it has no backend for this device."""
    try:
        return group._get_backend(torch.device(device_type)).options._timeout
    except (RuntimeError, AttributeError):
        return None


def flight_record() -> list[dict[str, Any]]:
    """torch's record of the collectives of this process; empty in a torch without it."""
    try:
        from torch._C import _distributed_c10d

        return pickle.loads(_distributed_c10d._dump_fr_trace(True, False, False)).get("entries", [])  # type: ignore[attr-defined, no-any-return]
    except (ImportError, AttributeError, RuntimeError):
        return []
