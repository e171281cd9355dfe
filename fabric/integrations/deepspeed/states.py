"""Full parameters and optimizer states of an engine, in torch's format. All ranks must make each call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.integrations.deepspeed.gradients import is_stepped
from fabric.strategies.zero1.shares import optimizer_view

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


def full_value(parameter: Any) -> Any:
    """Return a parameter's full value: that of its master weight, if it has one."""
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    if hasattr(parameter, "_z3_optimizer") and is_stepped(parameter):
        return safe_get_full_fp32_param(parameter)
    if hasattr(parameter, "ds_id"):
        with zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    if hasattr(parameter, "_hp_mapping") and parameter.dtype != torch.float32:
        return safe_get_full_fp32_param(parameter)
    return parameter.detach()


def module_state(module: Module, keep: bool) -> dict[str, Any]:
    """Return the full state dict of a user's module, in host memory."""
    state = module.state_dict()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = full_value(parameter)
        if name in state:
            state[name] = value.cpu() if keep else value.new_empty(0)
    return state


def load_module_state(module: Module, state: dict[str, Any], strict: bool) -> Any:
    """Load a full state dict, also into master weights; return torch's missing and unexpected keys."""
    split = any([hasattr(p, "ds_id") for p in module.parameters()])
    result = _load_split(module, state, strict) if split else module.load_state_dict(state, strict=strict)
    for name, parameter in module.named_parameters():
        if name in state and is_stepped(parameter):
            _set(parameter, state[name])
    return result


def optimizer_state(optimizer: Optimizer, engine: Any, keep: bool) -> dict[str, Any]:
    """Return the full state of an optimizer, in host memory.

    Args:
        optimizer: The user's optimizer, whose groups have the model's parameters.
        engine: The engine that steps them.
        keep: Whether this rank gets the values; otherwise it only calls the collectives of the gather.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    state: dict[Any, Any] = {}
    first_entry = _entry(engine)
    _link(engine)
    for parameter in _parameters(optimizer) if first_entry else ():
        entry = state[parameter] = {}
        for key, value in first_entry.items():
            if _is_split(value):
                full = safe_get_full_optimizer_state(parameter, key)
                entry[key] = full.cpu() if keep else full.new_empty(0)
            else:
                entry[key] = value.clone() if torch.is_tensor(value) else value
    found: dict[str, Any] = optimizer_view(optimizer, state=state).state_dict()
    return found


def load_optimizer_state(optimizer: Optimizer, engine: Any, state: dict[str, Any]) -> None:
    """Load a full state into an optimizer and its engine."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    if not state["state"]:
        return
    if not _entry(engine):
        _make_states(engine)
    _link(engine)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items() if is_stepped(parameter) else ():
            if _is_split(value):
                _set(parameter, value, key)
                continue
            for entry in engine.optimizer.optimizer.state.values():
                if torch.is_tensor(entry.get(key)):
                    entry[key].copy_(value)
                else:
                    entry[key] = value


def _set(parameter: Any, value: Any, key: str | None = None) -> None:
    """Write a full value into this rank's shard of a master weight, or of an optimizer state."""
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    value = value.to(parameter.device, torch.float32)
    split = hasattr(parameter, "ds_tensor")
    if split:  # DeepSpeed 0.19 does not set full values that do not divide by ranks
        size = parameter.ds_tensor.numel()
        shard = value.flatten()[size * dist.get_rank() :][:size]
        value = torch.cat([shard, shard.new_zeros(size - shard.numel())])
    if key is None:
        (safe_set_local_fp32_param if split else safe_set_full_fp32_param)(parameter, value)
    else:
        (safe_set_local_optimizer_state if split else safe_set_full_optimizer_state)(parameter, value, key)


def _entry(engine: Any) -> dict[str, Any]:
    """Return the state of one tensor of the engine's optimizer; empty before its first step."""
    entries = [entry for entry in engine.optimizer.optimizer.state.values() if entry]
    return {key: value for key, value in entries[0].items() if value is not None} if entries else {}


def _link(engine: Any) -> None:
    """Link parameters to their states: DeepSpeed does so only after the first group of the first step."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked") and _entry(engine):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _is_split(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() > 0


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if is_stepped(p)]


def _make_states(engine: Any) -> None:
    """Create the optimizer's states by a step with zero gradients, which changes nothing else."""
    zero = engine.optimizer
    masters = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
    for index, master in enumerate(masters):
        before, grad = master.detach().clone(), master.grad
        master.grad = torch.zeros_like(master)
        zero._optimizer_step(index)
        master.data.copy_(before)
        master.grad = grad


def _load_split(module: Module, state: dict[str, Any], strict: bool) -> Any:
    """Load a state dict into a sharded module; each submodule is gathered while it is loaded."""
    from deepspeed import zero

    contexts: dict[Any, Any] = {}

    def gather(part: Module, *_: Any) -> None:
        contexts[part] = zero.GatheredParameters(list(part.parameters(recurse=False)), modifier_rank=0)
        contexts[part].__enter__()

    def release(part: Module, _: Any) -> None:
        contexts.pop(part).__exit__(None, None, None)

    parts = list(module.modules())
    handles: list[Any] = [part.register_load_state_dict_pre_hook(gather) for part in parts]
    handles += [part.register_load_state_dict_post_hook(release) for part in parts]
    try:
        return module.load_state_dict(state, strict=strict)
    finally:
        for handle in handles:
            handle.remove()
