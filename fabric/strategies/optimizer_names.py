"""The names of an optimizer's parameters, by which the states in a checkpoint find them, in whatever order.

In a file they are the `param_names` of torch's own optimizers made of `model.named_parameters()`.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.registry import did_you_mean
from fabric.utilities.state_keys import clean_key, fitting
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.nn import Module
    from torch.optim import Optimizer

Names = list[list[str]]
"""By parameter group."""


def owners(state: Any, others: Iterable[Module]) -> dict[Module, str | None]:
    """The modules that name parameters, and where each stands in `state`; None: among `others` only.

    A part of another module is none of them: the name of a parameter must not depend on what else is saved.
    """
    found: dict[Module, str | None] = {}
    for place, module in _modules(state, ""):
        found.setdefault(module, place)
    for module in others:
        found.setdefault(module, None)
    parts = {part for module in found for part in module.modules() if part is not module}
    return {module: place for module, place in found.items() if module not in parts}


def names_of(optimizer: Optimizer, modules: dict[Module, str | None]) -> Names | None:
    """The names of an optimizer's parameters in their modules; None: not all have one.

    Of several modules, in which different parameters have the same names, also where these are in the state.
    """
    known: dict[Any, tuple[str | None, str]] = {}
    for module, place in modules.items():
        for name, parameter in module.named_parameters():
            known.setdefault(parameter, (place, clean_key(name)))
    groups = [group["params"] for group in optimizer.param_groups]
    held = list(dict.fromkeys(chain(*groups)))
    if not all([parameter in known for parameter in held]):
        own: Names = [group.get("param_names", []) for group in optimizer.param_groups]
        return own if _is_unique(own, groups) else None  # of named_parameters()
    names = {parameter: known[parameter][1] for parameter in held}
    if len({*names.values()}) < len(names):
        if None in [known[parameter][0] for parameter in held]:
            return None
        names = {parameter: ".".join(known[parameter]) for parameter in held}  # type: ignore[arg-type]
    return [[names[parameter] for parameter in group] for group in groups]


def with_names(saved: dict[str, Any], names: Names | None) -> dict[str, Any]:
    """An optimizer's state with the names of its parameters."""
    if names is None:
        return saved
    groups = [{**group, "param_names": own} for group, own in zip(saved["param_groups"], names, strict=True)]
    return {**saved, "param_groups": groups}


def by_name(saved: Any, optimizer: Optimizer, names: Names | None, strict: bool, what: str) -> Any:
    """An optimizer's saved state as if it had been saved with this one's order of parameters, and its groups.

    As it is, where file or optimizer have no names: torch goes by number then.

    Args:
        saved: As torch writes it.
        optimizer: What to load it into.
        names: Of the optimizer's parameters.
        strict: False: what has no place here is left out, and groups of other parameters keep their settings.
        what: How the user calls the optimizer, for the error text.

    Raises:
        UsageError: With `strict`, there are other names in the file, or in other groups.
    """
    groups = (isinstance(saved, dict) and saved.get("param_groups")) or []
    theirs = [group.get("param_names", []) for group in groups]
    if names is None or not groups or not _is_unique(theirs, [group["params"] for group in groups]):
        return saved
    fit = fitting([clean_key(name) for name in chain(*theirs)], {*chain(*names)})
    theirs = [[fit(name) for name in some] for some in theirs]
    if strict:
        _check(names, theirs, what)
    if isinstance(optimizer, torch.optim.LBFGS) and [*chain(*theirs)] != [*chain(*names)]:
        raise UsageError(
            f"The checkpoint has the parameters of {what} in another order, and LBFGS joins all of them in "
            f"one vector. Make it of them in this order: {_some([*chain(*theirs)])}."
        )
    return _renumbered(saved, optimizer, names, theirs)


def _is_unique(names: Names, held: list[list[Any]]) -> bool:
    """Whether each of the parameters has a name of its own."""
    each = [len(some) for some in names] == [len(some) for some in held]
    return each and len({*chain(*names)}) == len({*chain(*held)})


def _renumbered(saved: dict[str, Any], optimizer: Optimizer, names: Names, theirs: Names) -> dict[str, Any]:
    place: dict[str, int] = {}
    packed, start = [], 0
    for i, (own, group) in enumerate(zip(names, optimizer.param_groups, strict=True)):
        same = i < len(theirs) and {*theirs[i]} == {*own}
        settings = saved["param_groups"][i] if same else group
        settings = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
        here = [place.setdefault(name, number) for number, name in enumerate(own, start)]
        packed.append({**settings, "params": here})
        start += len(own)
    numbers = chain(*[group["params"] for group in saved["param_groups"]])
    known = dict(zip(numbers, chain(*theirs), strict=True))
    others = {number: entry for number, entry in saved["state"].items() if number not in known}
    moved = {place[name]: number for number, name in known.items() if name in place}
    entries = {here: saved["state"][n] for here, n in sorted(moved.items()) if n in saved["state"]}
    return {**saved, "state": {**entries, **others}, "param_groups": packed}


def _check(names: Names, theirs: Names, what: str) -> None:
    here = {name: i for i, group in enumerate(names) for name in group}
    there = {name: i for i, group in enumerate(theirs) for name in group}
    missing, unexpected = [name for name in here if name not in there], [n for n in there if n not in here]
    if missing or unexpected:
        said = [f"It has no {_some(missing)} of this optimizer."] * bool(missing)
        said += [f"It has {_some(unexpected)}, which this one has not."] * bool(unexpected)
        close = did_you_mean(unexpected[0], here) if unexpected else did_you_mean(missing[0], there)
        raise UsageError(
            f"The checkpoint has other parameters for {what}. {' '.join(said)}{close} Make the optimizer of "
            "the same parameters, or pass strict=False, which loads the states that have a place."
        )
    moved = [name for name, i in here.items() if there[name] != i]
    if moved or len(names) != len(theirs):
        text = f"{len(theirs)} groups, and here {len(names)}"
        for name in moved[:1]:
            text = f"{name!r} is in group {here[name]}, and was in group {there[name]}"
        raise UsageError(
            f"The checkpoint has the parameters of {what} in other groups, and settings (lr, ...) are those "
            f"of groups: {text}. Group them as they were, or pass strict=False: states go by name then, and "
            "such groups keep the settings of this optimizer."
        )


def _some(names: list[str]) -> str:
    return ", ".join([repr(name) for name in names[:3]]) + ", ..." * (len(names) > 3)


def _modules(tree: Any, place: str) -> Iterator[tuple[str, Module]]:
    inner = unwrap(tree)
    if isinstance(inner, torch.nn.Module):
        yield place, inner
    elif isinstance(tree, dict) or type(tree) in (list, tuple):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _modules(child, f"{place}.{key}" if place else f"{key}")
