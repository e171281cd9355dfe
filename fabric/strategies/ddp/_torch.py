"""Private names of DistributedDataParallel and its reducer; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

NOT_AVERAGED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module with the names of parameters and buffers that the user excludes from DDP."""


def leave_out_of_ddp(module: Any, names: list[str]) -> None:
    """Exclude parameters and buffers, by name, from DDP, before the module is wrapped."""
    setattr(module, NOT_AVERAGED, names)


def accumulator_of(parameter: torch.Tensor) -> Any:
    """Return the graph node that writes a parameter's gradient. A change of dtype or device replaces it."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


running_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the graph node that the backward pass of this thread executes, or None."""

check_reduced = methodcaller("_check_reducer_finalized")
"""Raise RuntimeError, with names of parameters, if a replica's reducer still waits for gradients."""

disarm = methodcaller("_reset_state")
"""Reset a reducer: it expects no gradients until `prepare_for_backward`."""

has_built_buckets = attrgetter("_has_rebuilt_buckets")
"""Whether a reducer has rebuilt its buckets. A reducer that is reset before rebuilds them in a later forward,
which other ranks may not make."""


def build_buckets(replica: Any) -> None:
    """Rebuild the buckets of a replica's reducer. All ranks must call it."""
    replica._has_rebuilt_buckets = replica.reducer._rebuild_buckets()


def renew_reducer(replica: Any, trained: list[torch.nn.Parameter], free: bool = False) -> None:
    """Give a replica whose backward failed a new reducer with its own memory.

    Reductions that the old reducer started complete later, in memory that is not read any more.

    Args:
        replica: The replica.
        trained: Its parameters.
        free: Free the old memory first. After an error the replica has no reducer then.
    """
    group = replica.process_group
    frozen = [p for p in trained if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)  # the new reducer must manage the same parameters as at setup
    if replica.reducer is not None:
        replica.reducer._remove_autograd_hooks()  # a compiled graph may keep the old reducer alive
    replica.process_group = torch.distributed.group.WORLD  # __getstate__ refuses any other group
    state = replica.__getstate__()
    if free:
        replica.reducer = replica.logger = None
    replica.__setstate__(state)
    for parameter in frozen:
        parameter.requires_grad_(False)
    replica._has_rebuilt_buckets = False
    if group is not replica.process_group:
        replica.process_group = group
        replica.reducer._update_process_group(group)
    restore_comm_hooks(replica)


def leave_out(replica: Any, reduced_elsewhere: set[Any], trained: list[torch.nn.Parameter]) -> None:
    """Restrict a replica's reducer to `trained`; it ignores `reduced_elsewhere` and the user's exclusions."""
    replica.require_backward_grad_sync = bool(trained)
    if not trained:  # a reducer must stay: copies of the replica build theirs of the same parameters
        replica.reducer._remove_autograd_hooks()
        reduced_elsewhere = set()
    users = replica.__dict__.setdefault("_fabric_ignored", {*replica.parameters_to_ignore})
    # The reducer's name of a parameter of the outermost module is ".weight".
    names = [
        f"{path}.{name}"
        for path, module in replica.module.named_modules()
        for name, parameter in module._parameters.items()
        if parameter in reduced_elsewhere
    ]
    ignored = {*users, *names}
    before, replica.parameters_to_ignore = replica.parameters_to_ignore, ignored
    if before != ignored and trained:
        renew_reducer(replica, trained)


def restore_comm_hooks(replica: Any) -> None:
    """Register the user's communication hooks of a replica with its new reducer."""
    hooks, replica._comm_hooks = replica._comm_hooks, []
    for hook, state in hooks:
        replica.register_comm_hook(state, hook)
