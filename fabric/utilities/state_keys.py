"""The keys of state dicts: the user's own, whatever wrapped or compiled the module. Used by wrappers and
checkpoints.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    import torch

PLAIN_DICTS = (dict, OrderedDict, Counter)
"""Kinds of dictionaries that safe loading gives back as they were."""
OUTER = "outer"
"""Beside the "state" of an optimizer: what an outer one (`LocalSGDStrategy`) knows of the same parameters."""
_PREFIXES = ("module.", "_forward_module.", "model.")
_COMPILED = "_orig_mod."


def clean_keys(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict under the user's own keys: what torch.compile adds is taken out."""
    if not any([_COMPILED in key for key in state]):
        return state
    return _renamed(state, clean_key)


def fit_keys(state: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """The state dict under the keys of `module`, whatever wrapped the module that it was saved from."""
    target = module.state_dict()
    own = {clean_key(key): key for key in target}
    if all([own.get(key) == key for key in state]):
        return state
    fit = fitting([clean_key(key) for key in state], own)
    parts = [f"{path}." for path in getattr(target, "_metadata", ()) if path]  # which have versions
    places = own | {clean_key(part): part for part in parts}
    return _renamed(state, lambda key: places.get(fit(key), fit(key)))


def with_ties(state: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """The state dict with names that it lacks of tensors that it has under another name of `module`, too."""
    named = (module.named_parameters, module.named_buffers)
    slots = [slot for names in named for slot in names(remove_duplicate=False)]
    held = {id(tensor): name for name, tensor in slots if name in state}
    found = {
        name: state[held[id(tensor)]] for name, tensor in slots if name not in state and id(tensor) in held
    }
    if not found:
        return state
    known = module.state_dict()  # a buffer may have a name that is not saved
    return same_dict_type(state, {**state, **{name: value for name, value in found.items() if name in known}})


def warn_if_unloaded(told: Any, saved: Mapping[str, Any]) -> None:
    """Warn if no tensor was loaded, by torch's missing and unexpected keys of loading `saved`."""
    missing, unexpected = getattr(told, "missing_keys", ()), getattr(told, "unexpected_keys", ())
    if missing and len(unexpected) >= len(saved):
        names = [*saved] or ["nothing"]
        nested = isinstance(saved.get(names[0]), dict)
        way = f"fabric.load(path, {{{names[0]!r}: model}})" if nested else f"{missing[0]!r} for {names[0]!r}"
        rank_zero_warn(
            f"0 of {len(missing)} tensors loaded. The names in the state dict ({names[0]!r}, ...) are none "
            f"of the model's ({missing[0]!r}, ...). Write {way}.",
            stacklevel=6,
        )


def fitting(
    keys: Collection[str], own: Collection[str], more: Iterable[tuple[str, str]] = ()
) -> Callable[[str], str]:
    """Return the function that maps keys saved from a module in other wrappers to the matching keys of `own`.

    `keys` are clean. `more` are other prefixes to try: what is taken out of all keys, and put there.
    """
    pairs = [*itertools.product(_shared_prefixes(keys), _shared_prefixes(own)), *more]
    out, into = max(pairs, key=lambda pair: sum([pair[1] + key[len(pair[0]) :] in own for key in keys]))
    return lambda key: into + clean_key(key).removeprefix(out)


def clean_key(key: str) -> str:
    """A key without what torch.compile adds."""
    return key.replace(_COMPILED, "")


def same_dict_type(old: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """`items` in a dictionary of `old`'s kind, with the versions that torch keeps at a state dict."""
    kind = type(old) if type(old) in PLAIN_DICTS else dict
    metadata = getattr(old, "_metadata", None)
    if metadata is None:
        return items if kind is dict else kind(items)
    made = OrderedDict(items)
    made._metadata = metadata  # type: ignore[attr-defined]
    return made


def _shared_prefixes(keys: Iterable[str]) -> list[str]:
    """The prefixes of wrappers that all keys have: none, the outermost, the two outermost, ..."""
    keys = list(keys)
    found = [""]
    while keys and (more := [p for p in _PREFIXES if all([key.startswith(found[-1] + p) for key in keys])]):
        found.append(found[-1] + more[0])
    return found


def _renamed(state: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    renamed = same_dict_type(state, {rename(key): value for key, value in state.items()})
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        # By module: "encoder.layer". A wrapper comes before what it wraps, whose version is the one that
        # counts.
        by_path = {_on_path(rename, path): facts for path, facts in versions.items()}
        renamed._metadata = by_path  # type: ignore[attr-defined]
    return renamed


def _on_path(rename: Callable[[str], str], path: str) -> str:
    return rename(f"{path}." if path else "").removesuffix(".")
