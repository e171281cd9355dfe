"""Nested data as a flat list of leaves and a spec: dict, list, tuple, namedtuple, dataclass.

Used by collectives, data transfer and dtype conversion. Sets, strings, tensors and all other objects are leaves.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Spec(NamedTuple):
    """The shape of a tree without its leaves. `kind` is None for a leaf. Compares and pickles by value."""

    kind: type | None
    keys: tuple[Any, ...]
    children: tuple[Spec, ...]


LEAF = Spec(None, (), ())


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """The leaves of `tree` in order (dict entries in insertion order) and what `unflatten` needs."""
    leaves: list[Any] = []
    return leaves, _flatten_into(tree, leaves)


def unflatten(leaves: list[Any], spec: Spec, like: Any = None) -> Any:
    """A new tree of the same types with `leaves` in place. `like` (the original) lends a dataclass its other fields."""
    return _build(iter(leaves), spec, like)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `function` applied to every leaf; a tree that is one leaf costs one call."""
    if not is_node(tree):
        return function(tree)
    leaves, spec = flatten(tree)
    return unflatten([function(leaf) for leaf in leaves], spec, tree)


def is_node(tree: Any) -> bool:
    """Whether `tree` is a container that `flatten` looks into."""
    return isinstance(tree, dict | list | tuple) or (
        dataclasses.is_dataclass(tree) and not isinstance(tree, type)
    )


def iter_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with the path that a person would write to reach it: `model.blocks[3].weight`, `['a'][0]`."""
    if not is_node(tree):
        yield path, tree
        return
    for key, child in _items(tree):
        yield from iter_paths(child, f"{path}{_step(tree, key)}")


def _step(tree: Any, key: Any) -> str:
    return f".{key}" if not isinstance(tree, dict | list | tuple) else f"[{key!r}]"


def _items(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, dict):
        return list(tree.items())
    if isinstance(tree, list | tuple):
        return list(enumerate(tree))
    return [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree)]


def _flatten_into(tree: Any, leaves: list[Any]) -> Spec:
    if not is_node(tree):
        leaves.append(tree)
        return LEAF
    items = _items(tree)
    keys = () if isinstance(tree, list | tuple) else tuple([key for key, _ in items])
    return Spec(type(tree), keys, tuple([_flatten_into(child, leaves) for _, child in items]))


def _build(leaves: Iterator[Any], spec: Spec, like: Any) -> Any:
    kind = spec.kind
    if kind is None:
        return next(leaves)
    if issubclass(kind, list | tuple):
        likes = like if isinstance(like, list | tuple) and len(like) == len(spec.children) else (None,) * len(spec.children)
        values = [_build(leaves, child, old) for child, old in zip(spec.children, likes, strict=True)]
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    old_of = like.get if isinstance(like, dict) else lambda key: getattr(like, key, None)
    items = [(key, _build(leaves, child, old_of(key))) for key, child in zip(spec.keys, spec.children, strict=True)]
    if issubclass(kind, defaultdict):
        return kind(like.default_factory if isinstance(like, defaultdict) else None, items)
    if issubclass(kind, dict):
        return kind(items) if kind in (dict, OrderedDict) else _fill(kind, items)
    return _build_dataclass(kind, dict(items), like)


def _fill(kind: type, items: list[tuple[Any, Any]]) -> Any:
    try:
        return kind(items)
    except TypeError:  # a dict subclass with a constructor of its own
        filled = kind.__new__(kind)
        filled.update(items)
        return filled


def _build_dataclass(kind: type, values: dict[str, Any], like: Any) -> Any:
    # Fields are set without __init__: a user's __post_init__ may check or change them, and init=False fields exist.
    made = object.__new__(kind)
    for name, value in {**getattr(like, "__dict__", {}), **values}.items():
        object.__setattr__(made, name, value)
    return made
