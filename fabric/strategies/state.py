"""Stateful objects to plain checkpoint data and back: gather, filter, strict restore. All ranks take part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ArgumentTypeError, ConfigurationError, RankError
from fabric.core.types import Stateful
from fabric.plugins.io.portable import detach_from_file, from_portable, to_portable
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from fabric.core.types import Filter

_PREFIXES = ("module.", "_orig_mod.", "_forward_module.", "model.")
_COMPILED = "_orig_mod."


class MissingKeysError(ConfigurationError, KeyError):
    """A checkpoint lacks what `state` asks for."""

    __str__ = ConfigurationError.__str__


def gather(strategy: Any, state: dict[str, Any], filter: Filter | None) -> dict[str, Any]:
    """`state` with every stateful object replaced by its (filtered) state, in types that safe loading reads.

    Raises:
        ArgumentTypeError: `state` is no dictionary, a filter is no function, or a value cannot be saved.
        MissingKeysError: `filter` names a key that `state` does not have.
    """
    if not isinstance(state, dict):
        raise ArgumentTypeError(
            f"fabric.save(path, state) needs a dictionary, but state is a {type(state).__name__}. "
            f'Write fabric.save(path, {{"model": model, "optimizer": optimizer}}).'
        )
    filter = _checked_filter(filter, state)
    plain = {key: _state_of(strategy, value) for key, value in state.items()}
    for key, keep in filter.items():
        plain[key] = {name: value for name, value in plain[key].items() if keep(name, value)}
    return {key: to_portable(value, f"state[{key!r}]") for key, value in plain.items()}


def restore(strategy: Any, checkpoint: dict[str, Any], state: Any | None, strict: bool) -> dict[str, Any]:
    """Load `checkpoint` into the objects of `state` (a dictionary, or one module or optimizer); gives the rest.

    Raises:
        MissingKeysError: With `strict`, `state` has keys that the checkpoint lacks.
    """
    if not state and not isinstance(state, torch.nn.Module):
        rest: dict[str, Any] = from_portable(detach_from_file(checkpoint))
        return rest
    if not isinstance(state, dict):
        _load_into(strategy, state, checkpoint, strict)
        return {}
    missing = [key for key in state if key not in checkpoint]
    if strict and missing:
        raise MissingKeysError(
            f"The checkpoint has no {', '.join(map(repr, missing))}; it has {', '.join(map(repr, checkpoint))}. "
            f"Remove the missing keys from state, or pass strict=False."
        )
    for key in state:
        if key in checkpoint:
            state[key] = _load_value(strategy, state[key], checkpoint.pop(key), strict)
    rest = from_portable(detach_from_file(checkpoint))
    return rest


def clean_keys(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict under the user's own keys: what torch.compile adds is taken out."""
    if not any([_COMPILED in key for key in state]):
        return state
    return {key.replace(_COMPILED, ""): value for key, value in state.items()}


def fit_keys(state: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """The state dict under the keys of `module`, whatever wrapped or compiled the module that it was saved from."""
    own = {key.replace(_COMPILED, ""): key for key in module.state_dict()}
    if all([key in own and own[key] == key for key in state]):
        return state
    cleaned = clean_keys(state)
    for prefix in _PREFIXES:
        strangers = [key for key in cleaned if key not in own]
        if not strangers or not all([key.startswith(prefix) for key in cleaned]):
            continue
        if any([key.removeprefix(prefix) in own for key in cleaned]):
            cleaned = {key.removeprefix(prefix): value for key, value in cleaned.items()}
    return {own.get(key, key): value for key, value in cleaned.items()}


def raise_together(strategy: Any, failure: Exception | None, doing: str) -> None:
    """After a step that all ranks make: if any rank failed, all raise. All ranks must call this.

    The failed rank raises its own error; the others a RankError that quotes it.
    """
    if strategy.topology.world_size == 1:
        if failure is not None:
            raise failure
        return
    if not strategy.reduce_boolean_decision(failure is not None, all=False):
        return
    if failure is not None:
        rank = strategy.topology.rank
        note = f"rank {rank} failed while {doing}: {type(failure).__name__}: {failure}"
    else:
        note = ""
    notes = [strategy.broadcast(note, src) for src in range(strategy.topology.world_size)]
    if failure is not None:
        raise failure
    raise RankError("; ".join([n for n in notes if n]))


def _checked_filter(filter: Filter | None, state: dict[str, Any]) -> Filter:
    for key, keep in (filter or {}).items():
        if key not in state:
            raise MissingKeysError(f"filter has {key!r}, but state has only {', '.join(map(repr, state))}.")
        if not callable(keep):
            raise ArgumentTypeError(
                f"filter[{key!r}] must be a function (name, value) -> bool, but is {type(keep).__name__}."
            )
        if not isinstance(unwrap(state[key]), Stateful | dict):
            raise ArgumentTypeError(
                f"filter[{key!r}] filters names, but state[{key!r}] has none: {type(state[key])}."
            )
    return filter or {}


def _state_of(strategy: Any, value: Any) -> Any:
    inner = unwrap(value)
    if isinstance(inner, torch.nn.Module):
        return strategy.get_module_state_dict(value)
    if isinstance(inner, torch.optim.Optimizer):
        return strategy.get_optimizer_state(value)
    if isinstance(inner, Stateful) and not isinstance(inner, type):
        return inner.state_dict()
    if type(value) is dict:
        return {key: _state_of(strategy, child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_state_of(strategy, child) for child in value])
    return value


def _load_value(strategy: Any, target: Any, value: Any, strict: bool) -> Any:
    """`target` with `value` loaded into it; plain data is replaced."""
    if _is_stateful(target):
        _load_into(strategy, target, value, strict)
        return target
    if type(target) is dict and isinstance(value, dict) and _holds_stateful(target):
        return {
            k: _load_value(strategy, target[k], value[k], strict) if k in target else value[k] for k in value
        }
    if type(target) in (list, tuple) and _holds_stateful(target) and len(target) == len(value):
        return type(target)([_load_value(strategy, t, v, strict) for t, v in zip(target, value, strict=True)])
    return from_portable(detach_from_file(value))


def _load_into(strategy: Any, target: Any, value: Any, strict: bool) -> None:
    inner = unwrap(target)
    if isinstance(inner, torch.nn.Module):
        strategy.load_module_state_dict(target, from_portable(value), strict=strict)
    elif isinstance(inner, torch.optim.Optimizer):
        strategy.load_optimizer_state(target, from_portable(detach_from_file(value)))
    else:
        inner.load_state_dict(from_portable(detach_from_file(value)))


def _is_stateful(value: Any) -> bool:
    inner = unwrap(value)
    return isinstance(inner, Stateful) and not isinstance(inner, type)


def _holds_stateful(tree: Any) -> bool:
    children = tree.values() if isinstance(tree, dict) else tree
    return any([_is_stateful(c) or (type(c) in (dict, list, tuple) and _holds_stateful(c)) for c in children])
