"""Stateful objects to plain checkpoint data and back: gather, filter, strict restore."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fabric.checkpoint.optimizer_names import by_name, first_three, known_names, names_of, with_names
from fabric.checkpoint.portable import LazyTensor, from_portable, module_entries, to_portable
from fabric.core.backward_listeners import parameters_of
from fabric.core.errors import ArgumentTypeError, ConfigurationError, RankError, UsageError
from fabric.core.tree import flatten
from fabric.utilities.init import name_of, names_of_owners
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.state_keys import LOSS_SCALE, clean_key, same_dict_type, warn_if_unloaded
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Iterator
    from threading import Thread

    from fabric.checkpoint.optimizer_names import Known
    from fabric.core.types import Filter


WRITING: dict[Thread, None] = {}
"""Threads of `wait=False` saves, of all Fabric objects of this process; they were started."""


class MissingKeysError(ConfigurationError, KeyError):
    """A checkpoint lacks a key of `state`."""

    __str__ = ConfigurationError.__str__


def gather(
    strategy: Any, state: dict[str, Any], filter: Filter | None, allow_pickle: bool = False
) -> dict[str, Any]:
    """Return `state` with each stateful object replaced by its (filtered) state. All ranks must call this.

    All values have types that safe loading reads. With `allow_pickle` other objects are pickled.

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
    known = known_names(state, strategy.modules)
    plain = {key: _state_of(strategy, value, known) for key, value in state.items()}
    if strategy.traits.splits_parameters and any([_is_part(leaf) for leaf in flatten(plain)[0]]):
        plain = strategy.layout.unshard_tree(plain)  # otherwise the file would have rank zero's shards only
    strategy.layout.check_saved(plain)
    for key, keep in filter.items():
        entries = {name: value for name, value in plain[key].items() if keep(name, value)}
        plain[key] = same_dict_type(plain[key], entries)
    portable: dict[str, Any] = to_portable(plain, "state", allow_pickle)
    return portable


def split_content(strategy: Any, state: Any) -> str:
    """Return a description of the content of `state` that is sharded; it must be equal on all ranks.

    Saving it needs communication. "" if the layout shards no optimizers."""
    if not strategy.traits.splits_optimizers:
        return ""
    leaves = [unwrap(leaf) for leaf in flatten(state)[0]]
    objects = sharded_objects(strategy, leaves)
    parts = sum([_is_part(leaf) for leaf in leaves])
    return (
        "".join([f"{one}; " for one in objects])
        + f"{len(objects)} models and optimizers, {parts} split tensors"
    )


def sharded_objects(strategy: Any, leaves: list[Any]) -> list[str]:
    """Return the names of the models and optimizers that are sharded."""
    traits = strategy.traits
    modules = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]
    objects = [name_of(module) for module in modules if traits.splits_parameters]
    for leaf in leaves:
        if isinstance(leaf, torch.optim.Optimizer) and traits.splits_optimizers:
            owners = names_of_owners(parameters_of(leaf), strategy.modules)
            objects.append(f"{type(leaf).__name__} of {owners}")
    return objects


def restore(strategy: Any, checkpoint: dict[str, Any], state: Any | None, strict: bool) -> dict[str, Any]:
    """Load `checkpoint` into the objects of `state` (a dictionary, or one object); return its other entries.

    Raises:
        MissingKeysError: With `strict`, `state` has keys that the checkpoint lacks.
        UsageError: The checkpoint's content does not fit the objects of `state`.
    """
    load = _Load(strategy, strict, known_names(state, strategy.modules))
    if state is not None and not isinstance(state, dict):
        load.into(state, checkpoint, "the object to load")
        return {}
    plain: dict[str, Any] = load.entries(state, checkpoint, "state") if state else from_portable(checkpoint)
    return plain


def named(checkpoint: dict[str, Any], state: Any) -> dict[str, Any]:
    """Return a checkpoint under the names of `state`.

    Only the content of a safetensors file changes. It has no name for its model, so it gets the name of the
    model in `state`, unless `state` consists of tensors, too.

    Raises:
        MissingKeysError: `state` has several names, and an object among them.
    """
    held = checkpoint.values() if isinstance(checkpoint, dict) and isinstance(state, dict) else ()
    if not held or not all([isinstance(value, LazyTensor) for value in held]):
        return checkpoint
    objects = [name for name in state if _is_stateful(state[name]) or _holds_stateful(state[name])]
    if objects and len(state) > 1:
        raise MissingKeysError(
            f"A safetensors file is the tensors of one model, without a name, but state has "
            f"{', '.join(map(repr, state))}. Load it with fabric.load_raw(path, model), and the rest from "
            "where it was saved."
        )
    inner = objects or [name for name in state if len(state) == 1 and isinstance(state[name], dict)]
    return {inner[0]: checkpoint} if inner else checkpoint


@contextmanager
def together(strategy: Any, doing: str) -> Iterator[None]:
    """Context of a step of all ranks: if it fails on one, all of them raise. All ranks must enter it.

    The failed rank raises its error. All others, also if they failed as a consequence, raise a RankError.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if strategy.topology.world_size > 1 and strategy.reduce_boolean_decision(failure is not None, all=False):
        note = f"rank {strategy.topology.job_rank} failed while {doing}: {type(failure).__name__}: {failure}"
        quoting = isinstance(failure, RankError)
        failures = strategy.all_gather_object(
            (note * (failure is not None and not quoting), f"{failure}" * quoting)
        )
        causes = [cause for cause, _ in failures if cause]
        if failure is None or (quoting and causes):
            raise RankError("; ".join(causes or [quote for _, quote in failures if quote]))
    if failure is not None:
        raise failure


def finish_writing() -> None:
    """Wait until the `wait=False` saves of this process, also those of other Fabric objects, are written."""
    for thread in list(WRITING):
        thread.join()
        WRITING.pop(thread, None)


def _checked_filter(filter: Filter | None, state: dict[str, Any]) -> Filter:
    if filter is not None and not isinstance(filter, dict):
        raise ArgumentTypeError(
            f"fabric.save(filter=...) needs a dictionary of functions, but got a {type(filter).__name__}. "
            f'Write filter={{"model": lambda name, value: "head" in name}}.'
        )
    for key, keep in (filter or {}).items():
        if key not in state:
            raise MissingKeysError(f"filter has {key!r}, but state has only {', '.join(map(repr, state))}.")
        named = _is_stateful(state[key]) or isinstance(state[key], dict)
        if not callable(keep) or not named:
            raise ArgumentTypeError(
                f"filter[{key!r}] must be a function (name, value) -> bool, and state[{key!r}] have names, "
                f"but they are {type(keep).__name__} and {type(state[key]).__name__}."
            )
    return filter or {}


def _state_of(strategy: Any, value: Any, known: Known) -> Any:
    inner = unwrap(value)
    if isinstance(inner, torch.nn.Module):
        saved = strategy.get_module_state_dict(value)
        _warn_of_metrics(saved, inner, strategy.topology.world_size)
        return saved
    if isinstance(inner, torch.optim.Optimizer):
        saved = with_names(strategy.get_optimizer_state(value), names_of(inner, known))
        scale = strategy.precision.state_dict() if "param_groups" in saved else {}
        return {**saved, LOSS_SCALE: scale} if scale else saved
    if _is_stateful(value):
        return value.state_dict()
    if not _holds_stateful(value):
        return value
    if isinstance(value, dict):
        return same_dict_type(value, {key: _state_of(strategy, child, known) for key, child in value.items()})
    return type(value)([_state_of(strategy, child, known) for child in value])


def _warn_of_metrics(saved: dict[str, Any], module: torch.nn.Module, world: int) -> None:
    """Warn if metrics of torchmetrics have updates of which `saved`, the module's state, lacks some."""
    metrics = {path for path, part in module.named_modules() if getattr(part, "update_called", None) is True}
    if metrics and (not saved or (world > 1 and any([key.rpartition(".")[0] in metrics for key in saved]))):
        held = f"the updates of rank 0 of {world} only" if saved else "none of its updates"
        rank_zero_warn(
            f"The checkpoint has {held} for {name_of(module)}, so a resumed run would compute another value. "
            "Save after its reset(), or keep sums that are equal on all ranks (all_reduce) in state instead."
        )


def _is_part(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def _with_factories(target: Any, loaded: Any) -> Any:
    """Return `loaded` with the `default_factory` of each defaultdict in `target`: a file has dictionaries."""
    if not (isinstance(target, dict) and isinstance(loaded, dict)):
        return loaded
    factory = getattr(target, "default_factory", None)
    for key, value in loaded.items():
        if key in target:
            loaded[key] = _with_factories(target[key], value)
        elif factory is not None and isinstance(value, dict):  # of defaultdict(lambda: defaultdict(int))
            loaded[key] = _with_factories(factory(), value)
    return defaultdict(target.default_factory, loaded) if isinstance(target, defaultdict) else loaded


class _Load:
    """One load into the objects of a state, in place."""

    def __init__(self, strategy: Any, strict: bool, known: Known) -> None:
        self.strategy, self.strict, self.known = strategy, strict, known

    def entries(self, state: dict[Any, Any], saved: Any, name: str) -> Any:
        """Load `saved` into the entries of `state`, a dictionary with objects; return its other entries."""
        if not isinstance(saved, dict):
            raise UsageError(
                f"The checkpoint holds a {_kind(saved)} where {name} is a dictionary. Load it with "
                f"fabric.load(path), or fabric.load_raw(path, model) if it is the state of one object."
            )
        missing = [key for key in state if key not in saved]
        if missing and (self.strict or len(missing) == len(state)):
            text = f"The checkpoint has no {', '.join(map(repr, missing))} for {name}; "
            text += _advice(saved, state, name)
            if self.strict:
                raise MissingKeysError(text)
            rank_zero_warn(f"fabric.load(..., strict=False) loaded nothing. {text}")
        elif missing:
            rank_zero_warn(
                f"{len(state) - len(missing)} of {len(state)} entries of {name} loaded (strict=False). The "
                f"checkpoint has no {first_three(missing)}: unchanged."
            )
        rest = {key: value for key, value in saved.items() if key not in state}
        for key, value in saved.items():
            if key in state:
                state[key] = self.value(state[key], value, f"{name}[{key!r}]")
        return from_portable(rest)

    def value(self, target: Any, value: Any, name: str) -> Any:
        """Return `target` with `value` loaded into it, or `value` in place of plain data."""
        if _is_stateful(target):
            self.into(target, value, name)
            return target
        if isinstance(target, torch.nn.Parameter) and not _is_part(target):  # of no model: `log_alpha`
            target.data.copy_(from_portable(value))
            return target
        if not _holds_stateful(target):
            return _with_factories(target, from_portable(value))
        if isinstance(target, dict):
            target.update(self.entries(target, value, name))
            return target
        if not isinstance(value, list | tuple) or len(value) != len(target):
            held = f"{len(value)} entries" if isinstance(value, list | tuple) else f"a {_kind(value)}"
            raise UsageError(
                f"The checkpoint holds {held} where {name} has {len(target)}. Pass as many objects as "
                "were saved."
            )
        loaded = [
            self.value(old, new, f"{name}[{i}]")
            for i, (old, new) in enumerate(zip(target, value, strict=True))
        ]
        if isinstance(target, tuple):
            return tuple(loaded)
        target[:] = loaded
        return target

    def into(self, target: Any, value: Any, name: str) -> None:
        """Load one object."""
        inner = unwrap(target)
        if isinstance(inner, torch.nn.Module):
            if not isinstance(value, dict):
                raise UsageError(
                    f"The checkpoint holds a {_kind(value)} where {name} is a module. Write "
                    "fabric.load(path), which returns the content, and use the key of the module."
                )
            if self.strict:  # else a warning counts the tensors
                _reject_nested(value, name)
            entries = module_entries(value, inner)
            result = self.strategy.load_module_state_dict(target, entries, strict=self.strict)
            if not warn_if_unloaded(result, entries):
                _warn_of_part(result, entries, inner)
        elif isinstance(inner, torch.optim.Optimizer):
            scale = None
            if _is_optimizer_state(value, inner, name):
                _check_settings(value, inner, name)
                scale = value.get(LOSS_SCALE)
                value = {key: entry for key, entry in value.items() if key != LOSS_SCALE}
                value = _entries(by_name(value, inner, self.known, self.strict, name), inner)
            else:
                value = from_portable(value, stored=True)
            self.strategy.load_optimizer_state(target, value)
            precision = self.strategy.precision
            if isinstance(scale, dict) and scale.keys() == precision.state_dict().keys():  # of this precision
                precision.load_state_dict(from_portable(scale))
        elif _is_stateful(target):
            target.load_state_dict(from_portable(value))
        else:
            raise ArgumentTypeError(
                f"fabric.load_raw(path, obj) needs a model, an optimizer or another object with "
                f"load_state_dict(), but got {type(target).__name__}. Write data = fabric.load(path) "
                f"to read plain data."
            )


def _reject_nested(saved: dict[Any, Any], name: str) -> None:
    """Raise UsageError if a module's state is not in `saved` but one level deeper."""
    states = [key for key, value in saved.items() if isinstance(value, dict) and value]
    tensors = [value for value in saved.values() if isinstance(value, torch.Tensor | LazyTensor)]
    if not states or tensors or all([str(key).endswith("_extra_state") for key in states]):
        return
    held, deeper = ", ".join(map(repr, [*saved][:8])), f"{{{states[0]!r}: model}}"
    write = f"Give {deeper} in place of the model." if name != "the object to load" else ""
    raise UsageError(
        f"The checkpoint has {held} where {name} is a module, and no tensors. "
        f"{write or f'Write fabric.load(path, {deeper}).'}"
    )


def _warn_of_part(result: Any, saved: dict[str, Any], module: torch.nn.Module) -> None:
    """Warn if loading `saved` with `strict=False` loaded a part; `result` has torch's missing and unexpected
    keys. A file without frozen parameters is complete: training did not change them.
    """
    missing, unexpected = getattr(result, "missing_keys", ()), getattr(result, "unexpected_keys", ())
    named = [*module.named_parameters(remove_duplicate=False)]
    frozen = {key for key, parameter in named if not parameter.requires_grad}
    for path, part in module.named_modules(remove_duplicate=False):  # and buffers of frozen modules
        if not any([parameter.requires_grad for parameter in part.parameters()]):
            frozen.update([f"{path}.{key}" if path else key for key, _ in part.named_buffers()])
    if unexpected or not frozen.issuperset(map(clean_key, missing)):
        loaded = len(saved) - len(unexpected)
        lacks = f" The checkpoint has no {first_three(missing)}: unchanged." if missing else ""
        rest = f" The model has no {first_three(unexpected)}: not loaded." if unexpected else ""
        rank_zero_warn(
            f"{loaded} of {loaded + len(missing)} tensors of {name_of(module)} loaded (strict=False)."
            f"{lacks}{rest}"
        )


def _advice(saved: dict[Any, Any], state: dict[Any, Any], place: str) -> str:
    """Return the part of an error that lists the names in the checkpoint, and the code to write instead."""
    held = "it has " + (", ".join([*map(repr, saved)][:8]) + ", ..." * (len(saved) > 8) or "nothing")
    bare = all([isinstance(value, torch.Tensor) for value in saved.values()])
    bare |= {"state", "param_groups"} <= saved.keys()
    if saved and bare and place == "state":
        return f"{held}, and looks like a bare state_dict. Write fabric.load_raw(path, {next(iter(state))})."
    if not state.keys() & saved.keys():
        return f"{held}. Give the objects under the names that the checkpoint has."
    return f"{held}. Remove the missing keys from state, or pass strict=False."


def _is_optimizer_state(saved: Any, optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Whether `saved` has torch's format; False: the optimizer has its own `load_state_dict`.

    Raises:
        UsageError: It is something else.
    """
    held = saved if isinstance(saved, dict) else {}
    if {"state", "param_groups"} <= held.keys():
        return True
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return False
    there = ", ".join([repr(key) for key in [*held][:3]]) or f"a {_kind(saved)}"
    raise UsageError(
        f"The checkpoint holds {there} where {name} is an optimizer ({type(optimizer).__name__}), whose "
        'state has "state" and "param_groups". Write fabric.load(path, {"name": optimizer}) with '
        "the name that it was saved under. A safetensors file has no optimizer."
    )


def _check_settings(saved: dict[str, Any], optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise UsageError if `saved` is of another class of torch's: it lacks settings that `optimizer` reads.

    Files of an older torch lack switches only (bool or None), which torch adds.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    settings, kind = optimizer.defaults, type(optimizer).__name__
    needed = [key for key in settings if settings[key] is not None and type(settings[key]) is not bool]
    for group in saved["param_groups"]:
        missing = [key for key in needed if key not in group]
        held = [key for key in group if key not in settings and key != "params"]
        if missing and held:
            raise UsageError(
                f"The checkpoint of {name} is of another optimizer than {kind}. It has {first_three(held)}, "
                f"and no {first_three(missing)}. Load it into one of its class, or leave {name} out."
            )


def _entries(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's saved state to load from.

    Each old entry is freed before the new one is read, so that both are never in memory.
    """
    theirs = [group["params"] for group in saved["param_groups"]]
    held = [group["params"] for group in optimizer.param_groups]
    # With other groups torch raises, and the optimizer stays as it was.
    alike = [len(some) for some in theirs] == [len(some) for some in held]
    parameters = dict(zip(chain(*theirs), chain(*held), strict=True)) if alike else {}
    entries = {}
    for number, entry in saved["state"].items():
        if number in parameters:
            optimizer.state.pop(parameters[number], None)
        entries[number] = from_portable(entry, stored=True)
    return {**from_portable({**saved, "state": {}}), "state": entries}


def _kind(value: Any) -> str:
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _is_stateful(value: Any) -> bool:
    # Not isinstance(Stateful): from Python 3.12 on it ignores methods that __getattr__ returns (those of a
    # wrapped loader).
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all([callable(getattr(value, name, None)) for name in names])


def _holds_stateful(tree: Any) -> bool:
    if not isinstance(tree, dict) and type(tree) not in (list, tuple):
        return False
    children = tree.values() if isinstance(tree, dict) else tree
    return any([_is_stateful(child) or _holds_stateful(child) for child in children])
