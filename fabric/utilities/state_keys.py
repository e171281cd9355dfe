"""Keys of state dicts without the prefixes of wrappers and torch.compile, for wrappers and checkpoints."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    import torch

PLAIN_DICTS = (dict, OrderedDict, Counter)
"""Classes of dictionaries that `torch.load(weights_only=True)` restores."""
OUTER = "outer"
"""Key in an optimizer's state dict: the outer optimizer's state (`LocalSGDStrategy`) of its parameters."""
LOSS_SCALE = "loss_scale"
"""Key in the saved state of an optimizer: the state of its scaler, under "16-mixed"."""
_PREFIXES = ("module.", "_forward_module.", "model.")
_COMPILED = "_orig_mod."


def clean_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with the user's keys, without the prefix of torch.compile."""
    if not any([_COMPILED in key for key in state]):
        return state
    return _renamed(state, clean_key)


def fit_keys(state: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict with the keys of `module`, also if it was saved from a wrapped module."""
    target = module.state_dict()
    keys = {clean_key(key): key for key in target}
    if all([keys.get(key) == key for key in state]):
        return state
    fit = key_mapping([clean_key(key) for key in state], keys)
    paths = [f"{path}." for path in getattr(target, "_metadata", ()) if path]  # modules with a version
    targets = keys | {clean_key(path): path for path in paths}
    return _renamed(state, lambda key: targets.get(fit(key), fit(key)))


def add_tied_keys(state: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict with all names of tied tensors of which it has one name."""
    named = (module.named_parameters, module.named_buffers)
    slots = [slot for names in named for slot in names(remove_duplicate=False)]
    saved = {id(tensor): name for name, tensor in slots if name in state}
    tied = {
        name: state[saved[id(tensor)]] for name, tensor in slots if name not in state and id(tensor) in saved
    }
    if not tied:
        return state
    keys = module.state_dict()  # without non-persistent buffers
    return same_dict_type(state, {**state, **{name: value for name, value in tied.items() if name in keys}})


def warn_if_unloaded(result: Any, saved: Mapping[str, Any]) -> bool:
    """Warn if loading `saved` loaded no tensor, and return whether it did not; `result` has torch's missing
    and unexpected keys.
    """
    missing = [*getattr(result, "missing_keys", ())]
    unexpected = getattr(result, "unexpected_keys", ())
    none_loaded = bool(missing) and len(unexpected) >= len(saved)
    if none_loaded:
        names = [*saved] or ["nothing"]
        nested = isinstance(saved.get(names[0]), dict)
        fix = f"fabric.load(path, {{{names[0]!r}: model}})" if nested else f"{missing[0]!r} for {names[0]!r}"
        rank_zero_warn(
            f"0 of {len(missing)} tensors loaded. The names in the state dict ({names[0]!r}, ...) are none "
            f"of the model's ({missing[0]!r}, ...). Write {fix}."
        )
    return none_loaded


def key_mapping(
    keys: Collection[str], targets: Collection[str], prefixes: Iterable[tuple[str, str]] = ()
) -> Callable[[str], str]:
    """Return the function that maps keys saved from a module in other wrappers to the matching `targets`.

    `keys` are clean. `prefixes`: further pairs to try, of a prefix to remove from all keys and one to add.
    """
    pairs = [*itertools.product(_shared_prefixes(keys), _shared_prefixes(targets)), *prefixes]
    old, new = max(pairs, key=lambda pair: sum([pair[1] + key[len(pair[0]) :] in targets for key in keys]))
    return lambda key: new + clean_key(key).removeprefix(old)


def clean_key(key: str) -> str:
    """Return a key without the prefix of torch.compile."""
    return key.replace(_COMPILED, "")


def same_dict_type(old: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return `items` in a dictionary of `old`'s class, with the `_metadata` of torch's state dicts."""
    kind = type(old) if type(old) in PLAIN_DICTS else dict
    metadata = getattr(old, "_metadata", None)
    if metadata is None:
        return items if kind is dict else kind(items)
    made = OrderedDict(items)
    made._metadata = metadata  # type: ignore[attr-defined]
    return made


def _shared_prefixes(keys: Iterable[str]) -> list[str]:
    """Return the wrapper prefixes that all keys share: "", the outermost, the two outermost, ..."""
    keys = list(keys)
    found = [""]
    while keys and (more := [p for p in _PREFIXES if all([key.startswith(found[-1] + p) for key in keys])]):
        found.append(found[-1] + more[0])
    return found


def _renamed(state: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    renamed = same_dict_type(state, {rename(key): value for key, value in state.items()})
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        # Keyed by module path. The wrapped module follows its wrapper, so that its version is kept.
        by_path = {_on_path(rename, path): facts for path, facts in versions.items()}
        renamed._metadata = by_path  # type: ignore[attr-defined]
    return renamed


def _on_path(rename: Callable[[str], str], path: str) -> str:
    return rename(f"{path}." if path else "").removesuffix(".")
