"""Names of an optimizer's parameters, by which saved states are matched to parameters in any order.

A file has them by group, as `param_names` next to an optimizer's `state` and `param_groups`. The names that
torch writes into groups of optimizers made of `model.named_parameters()` are read, too.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.registry import did_you_mean
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.state_keys import OUTER, clean_key, key_mapping
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.nn import Module
    from torch.optim import Optimizer

Names = list[list[str]]
"""Names of parameters by parameter group."""
Known = dict[Any, list[tuple[str | None, str]]]
"""For each parameter: the keys in `state` of the modules that have it, and its names in these modules."""


def known_names(state: Any, others: Iterable[Module]) -> Known:
    """Return each parameter's names, and the keys in `state` of their modules; None: a module of `others`.

    A tied parameter has several names. Submodules of another module are ignored: a name must not depend on
    other entries of `state`.
    """
    places: dict[Module, str | None] = {}
    for place, module in [*_modules(state, ""), *[(None, module) for module in others]]:
        places.setdefault(module, place)
    parts = {part for module in places for part in module.modules() if part is not module}
    known: Known = {}
    for module, place in places.items():
        for name, parameter in module.named_parameters(remove_duplicate=False) if module not in parts else ():
            known.setdefault(parameter, []).append((place, clean_key(name)))
    return known


def names_of(optimizer: Optimizer, known: Known) -> Names | None:
    """Return the names of an optimizer's parameters in their modules; None: not all have one.

    If different parameters of several modules have the same name, the module's key in `state` is a prefix.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    held = list(dict.fromkeys(chain(*groups)))
    if not all([parameter in known for parameter in held]):
        own: Names = [group.get("param_names", []) for group in optimizer.param_groups]
        return own if _is_unique(own, groups) else None  # made of named_parameters()
    first = {parameter: known[parameter][0] for parameter in held}
    names = {parameter: name for parameter, (_, name) in first.items()}
    if len({*names.values()}) < len(names):
        if None in [place for place, _ in first.values()]:
            return None
        names = {parameter: ".".join(pair) for parameter, pair in first.items()}  # type: ignore[arg-type]
    return [[names[parameter] for parameter in group] for group in groups]


def with_names(saved: dict[str, Any], names: Names | None) -> dict[str, Any]:
    """Return an optimizer's state with the names of its parameters.

    They are not in its groups: torch would keep them in the optimizer that loads the state.
    """
    return {**saved, "param_names": names} if names is not None and "param_groups" in saved else saved


def by_name(
    saved: dict[str, Any], optimizer: Optimizer, known: Known, strict: bool, what: str
) -> dict[str, Any]:
    """Return an optimizer's saved state in the order of parameters, and with the groups, of `optimizer`.

    Without names in the file or the optimizer, states are matched by number. The result has no names.

    Args:
        saved: A state of torch, or a result of `with_names`.
        optimizer: The optimizer that will load it.
        known: A result of `known_names`.
        strict: False: states without a parameter are dropped, with a warning, and groups with other
            parameters keep their settings.
        what: The optimizer's name in errors.

    Raises:
        UsageError: With `strict`, there are other names in the file, or in other groups, or other shapes.
    """
    saved, theirs = _without_names(saved)
    names, fitted = names_of(optimizer, known), saved
    there = here = [f"parameter {number}" for number in _packed(saved)]
    if names is not None and _is_unique(theirs, [group["params"] for group in saved["param_groups"]]):
        theirs = _to_local_names(theirs, names, _aliases(optimizer, names, known))
        if strict:
            _check(names, theirs, what)
        there, here = [*chain(*theirs)], [*chain(*names)]
        if isinstance(optimizer, torch.optim.LBFGS) and there != here:
            raise UsageError(
                f"The checkpoint has the parameters of {what} in another order, and LBFGS joins all of them "
                f"in one vector. Make it of them in this order: {first_three(there)}."
            )
        fitted = _renumbered(saved, optimizer, names, theirs)
    wrong = _of_other_shapes(fitted, optimizer, here)
    if strict and wrong:
        raise UsageError(
            f"{what}: {next(iter(wrong.values()))}. Load it into the optimizer of the model that it was "
            "saved from, or pass strict=False, which leaves out such states."
        )
    kept = {number: entry for number, entry in fitted["state"].items() if number not in wrong}
    loaded = {name for number, name in zip(_packed(fitted), here, strict=True) if number in kept}
    states = [name for number, name in zip(_packed(saved), there, strict=True) if number in saved["state"]]
    left = [name for name in states if name not in loaded]
    if left:
        rank_zero_warn(
            f"{len(states) - len(left)} of {len(states)} states were loaded into {what} (strict=False). Its "
            f"parameters do not match {first_three(left)}."
        )
    return {**fitted, "state": kept}


def _aliases(optimizer: Optimizer, names: Names, known: Known) -> dict[str, str]:
    """Return, for each name that only one parameter has, that parameter's name in `names`."""
    found: dict[str, set[str]] = {}
    parameters = chain(*[group["params"] for group in optimizer.param_groups])
    for parameter, own in zip(parameters, chain(*names), strict=True):
        for place, name in known.get(parameter, ()):
            for alias in (name,) if place is None else (name, f"{place}.{name}"):
                found.setdefault(alias, set()).add(own)
    single = {alias: next(iter(own)) for alias, own in found.items() if len(own) == 1}
    return single | {name: name for name in chain(*names)}


def _to_local_names(theirs: Names, names: Names, aliases: dict[str, str]) -> Names:
    """Return the names in a file mapped to names in this optimizer; unknown names are unchanged.

    All may have one prefix more or less, if the module was saved as part of another. Names stay distinct.
    """
    theirs = [[clean_key(name) for name in some] for some in theirs]
    keys = [*chain(*theirs)]
    moves = [(prefix, "") for prefix in _shared(keys)]
    moves += [("", prefix) for prefix in _shared([*chain(*names)])]
    fit = key_mapping(keys, aliases, moves)
    here = {key: aliases.get(fit(key), fit(key)) for key in keys}
    count = Counter(here.values())
    return [[here[key] if count[here[key]] == 1 else fit(key) for key in some] for some in theirs]


def _shared(names: list[str]) -> list[str]:
    """Return the dotted prefixes that all names have."""
    first = names[0] if names else ""
    found = [first[: n + 1] for n, letter in enumerate(first) if letter == "."]
    return [prefix for prefix in found if all([name.startswith(prefix) for name in names])]


def _without_names(saved: dict[str, Any]) -> tuple[dict[str, Any], Names]:
    """Return the state for torch, and the names: Fabric's, or else those that torch wrote into the groups."""
    groups = saved["param_groups"]
    names = saved.get("param_names") or [group.get("param_names", []) for group in groups]
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in groups]
    rest = {key: value for key, value in saved.items() if key != "param_names"}
    return {**rest, "param_groups": groups}, names


def _of_other_shapes(saved: dict[str, Any], optimizer: Optimizer, called: list[str]) -> dict[int, str]:
    """Return the errors, by number, of parameters whose states have another shape than the model's.

    For torch's optimizers only, whose states have their parameter's shape. A step may have one element. A
    parameter without elements is on another pipeline stage.
    """
    numbers = _packed(saved)
    parameters = [*chain(*[group["params"] for group in optimizer.param_groups])]
    free = isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor)
    if free or not type(optimizer).__module__.startswith("torch.optim") or len(numbers) != len(parameters):
        return {}
    wrong: dict[int, str] = {}
    for number, name, parameter in zip(numbers, called, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            sized = isinstance(value, torch.Tensor) and value.ndim and key != "step" and parameter.numel()
            if sized and value.shape != parameter.shape:
                shapes = f"{[*value.shape]} in the checkpoint and {[*parameter.shape]} in the model"
                wrong.setdefault(number, f"optimizer state {key!r} of {name} has shape {shapes}")
    return wrong


def _packed(saved: dict[str, Any]) -> list[int]:
    """Return the numbers of the parameters in an optimizer's saved state, in order."""
    return [*chain(*[group["params"] for group in saved["param_groups"]])]


def _is_unique(names: Names, held: list[list[Any]]) -> bool:
    """Whether each parameter has one name, and all names differ."""
    each = [len(some) for some in names] == [len(some) for some in held]
    return each and len({*chain(*names)}) == len({*chain(*held)})


def _renumbered(saved: dict[str, Any], optimizer: Optimizer, names: Names, theirs: Names) -> dict[str, Any]:
    groups, here = [], {name: number for number, name in enumerate(chain(*names))}
    for i, (own, group) in enumerate(zip(names, optimizer.param_groups, strict=True)):
        same = i < len(theirs) and {*theirs[i]} == {*own}
        settings = saved["param_groups"][i] if same else group
        groups.append({**settings, "params": [here[name] for name in own]})
        groups[-1].pop("param_names", None)
    place = {number: here.get(name) for name, number in zip(chain(*theirs), _packed(saved), strict=True)}
    states = {}
    for key in [key for key in ("state", OUTER) if key in saved]:
        moved = {place.get(number, number): entry for number, entry in saved[key].items()}
        states[key] = {number: entry for number, entry in moved.items() if number is not None}
    return {**saved, **states, "param_groups": groups}


def _check(names: Names, theirs: Names, what: str) -> None:
    here = {name: i for i, group in enumerate(names) for name in group}
    there = {name: i for i, group in enumerate(theirs) for name in group}
    missing, unexpected = [name for name in here if name not in there], [n for n in there if n not in here]
    errors = [f"It has no {first_three(missing)} of this optimizer."] * bool(missing)
    if unexpected:
        close = did_you_mean(unexpected[0], here)
        errors.append(f"It has {first_three(unexpected)}, which this one has not.{close}")
    kind = "other parameters"
    if not errors:
        kind = "other groups, and settings (lr, ...) are those of groups"
        moved = [name for name, i in here.items() if there[name] != i][:1]
        errors = [f"{name!r} is in group {here[name]}, and was in group {there[name]}." for name in moved]
        errors += [f"It has {len(theirs)} groups, and here are {len(names)}."] * (len(names) != len(theirs))
    if errors:
        raise UsageError(
            f"The checkpoint of {what} has {kind}. {' '.join(errors)} Make the optimizer of the same "
            "parameters in the same groups, or pass strict=False: then states are loaded where names match, "
            "and other groups keep the settings of this optimizer."
        )


def first_three(names: list[str]) -> str:
    """Return `'a', 'b', 'c', ...`: the first three of some names."""
    return ", ".join([repr(name) for name in names[:3]]) + ", ..." * (len(names) > 3)


def _modules(tree: Any, place: str) -> Iterator[tuple[str, Module]]:
    inner = unwrap(tree)
    if isinstance(inner, torch.nn.Module):
        yield place, inner
    elif isinstance(tree, dict) or type(tree) in (list, tuple):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _modules(child, f"{place}.{key}" if place else f"{key}")
