"""Conversion of a module that a layout changed to a plain one: full tensors, without the layout's hooks."""

from __future__ import annotations

import functools
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from fabric.core._torch import is_fsdp
from fabric.strategies._torch import FSDP_MARKS, STATE_KEYS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

FOREIGN_PACKAGES = {"torch.distributed.", "fabric."}
"""Prefixes of packages whose hooks are not the user's; engines add theirs."""


def is_plain(module: Module) -> bool:
    """Whether the module is unchanged: all forwards and hooks are the user's."""
    return not any(
        [
            is_fsdp(child)
            or _is_foreign(child.__dict__.get("forward"))
            or any([_is_foreign(hook) for table in _hooks_of(child) for hook in table.values()])
            for child in module.modules()
        ]
    )


def plain_copy(module: Module, values: dict[str, Tensor], device: torch.device) -> Module:
    """Return a copy of `module` with `values` in place of its tensors.

    Args:
        module: The user's module, sharded or not.
        values: Full tensors by name: all parameters, and sharded buffers.
        device: Device of the copy.
    """
    memo: dict[int, Any] = {id(child): _without_attributes(child) for child in module.modules()}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = values.get(name, tensor).detach().to(device, copy=True)
        memo[id(tensor)] = Parameter(value, tensor.requires_grad) if isinstance(tensor, Parameter) else value
    for child in module.modules():
        attributes = child.__dict__.items()
        memo[id(child)].__dict__.update(
            {key: _copy(key, value, memo) for key, value in attributes if _is_users(key, value)}
        )
    copied: Module = memo[id(module)]
    return copied


def _hooks_of(module: Module) -> list[dict[int, Any]]:
    return [table for name, table in module.__dict__.items() if name.endswith("_hooks")]


def _without_attributes(module: Module) -> Any:
    kind = type(module)
    if is_fsdp(module):
        kind = kind.__bases__[1]  # fully_shard creates a subclass of FSDPModule and the user's class
    return kind.__new__(kind)


def _copy(key: str, value: Any, memo: dict[int, Any]) -> Any:
    if key.endswith("_hooks"):
        value = type(value)({number: hook for number, hook in value.items() if not _is_foreign(hook)})
    if key == "_parameters":
        value = dict(value)  # an engine's dict subclass gathers parameters on access
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return value.detach().clone()
    try:
        return deepcopy(value, memo)
    except Exception:  # a value that cannot be copied (a file, a lock) is shared
        return value


def _is_users(key: str, value: Any) -> bool:
    """Whether an attribute is the user's. In some versions of torch keys of states are no plain strings."""
    if type(key) is not str or key in FSDP_MARKS or key.startswith(("_fabric_", STATE_KEYS)):
        return False
    return not (key in ("forward", "_apply", "__deepcopy__", "__reduce_ex__") and _is_foreign(value))


def _is_foreign(call: Any) -> bool:
    while isinstance(call, functools.partial):
        call = call.func
    call = getattr(call, "hook", call)  # torch wraps state dict hooks
    owner = getattr(call, "__module__", None) or type(call).__module__
    return isinstance(owner, str) and owner.startswith(tuple(FOREIGN_PACKAGES))
