"""A plain module out of one that a layout has changed: whole values, and none of the layout's hooks."""

from __future__ import annotations

import functools
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from fabric.core._torch import is_fsdp
from fabric.strategies._torch import FSDP_MARKS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

NOT_THE_USERS = {"torch.distributed.", "fabric."}
"""Packages whose hooks are no part of a model; an engine adds its own."""


def is_plain(module: Module) -> bool:
    """Whether nothing was changed: every forward is the user's, with hooks of the user's only."""
    return not any(
        [
            is_fsdp(part)
            or _is_foreign(part.__dict__.get("forward"))
            or any([_is_foreign(hook) for table in _hooks_of(part) for hook in table.values()])
            for part in module.modules()
        ]
    )


def plain_copy(module: Module, values: dict[str, Tensor], device: torch.device) -> Module:
    """A copy of `module` with these values in place of its tensors, by name.

    Args:
        module: The user's module, split or not.
        values: Whole tensors, of each parameter, and of buffers that are not whole.
        device: Where the copy is to be.
    """
    memo: dict[int, Any] = {id(part): _bare(part) for part in module.modules()}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = values.get(name, tensor).detach().to(device, copy=True)
        memo[id(tensor)] = Parameter(value, tensor.requires_grad) if isinstance(tensor, Parameter) else value
    for part in module.modules():
        memo[id(part)].__dict__.update(
            {key: _copy(key, value, memo) for key, value in part.__dict__.items() if _is_users(key, value)}
        )
    copied: Module = memo[id(module)]
    return copied


def _hooks_of(part: Module) -> list[dict[int, Any]]:
    return [table for name, table in part.__dict__.items() if name.endswith("_hooks")]


def _bare(part: Module) -> Any:
    kind = type(part)
    if is_fsdp(part):
        kind = kind.__bases__[1]  # fully_shard makes a class of its own and the user's
    return kind.__new__(kind)


def _copy(key: str, value: Any, memo: dict[int, Any]) -> Any:
    if key.endswith("_hooks"):
        value = type(value)({number: hook for number, hook in value.items() if not _is_foreign(hook)})
    if key == "_parameters":
        value = dict(value)  # an engine's own kind gathers what is read
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().clone()
    try:
        return deepcopy(value, memo)
    except Exception:  # what cannot be copied (a file, a lock) is no part of the model
        return value


def _is_users(key: str, value: Any) -> bool:
    """torch's composable functions keep their states under keys that are no plain strings."""
    if type(key) is not str or key in FSDP_MARKS or key.startswith("_fabric_"):
        return False
    return not (key in ("forward", "_apply") and _is_foreign(value))


def _is_foreign(call: Any) -> bool:
    while isinstance(call, functools.partial):
        call = call.func
    call = getattr(call, "hook", call)  # as torch wraps hooks on state dicts
    owner = getattr(call, "__module__", None) or type(call).__module__
    return isinstance(owner, str) and owner.startswith(tuple(NOT_THE_USERS))
