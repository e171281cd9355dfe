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
_CONTAINERS = (dict, list, tuple)


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
    # One call per container, none per leaf: verbs must not cost frames for every tensor of a large tree.
    if isinstance(tree, dict):
        keys, children = tuple(tree), tree.values()
    elif isinstance(tree, list | tuple):
        keys, children = (), tree
    elif hasattr(type(tree), "__dataclass_fields__") and not isinstance(tree, type):
        keys = tuple([f.name for f in dataclasses.fields(tree)])
        children = [getattr(tree, key) for key in keys]
    else:
        leaves.append(tree)
        return LEAF
    specs = []
    for child in children:
        if isinstance(child, _CONTAINERS) or hasattr(type(child), "__dataclass_fields__"):
            specs.append(_flatten_into(child, leaves))
        else:
            leaves.append(child)
            specs.append(LEAF)
    return Spec(type(tree), keys, tuple(specs))


def _build(leaves: Iterator[Any], spec: Spec, like: Any) -> Any:
    kind = spec.kind
    if kind is None:
        return next(leaves)
    olds = _old_children(spec, like)
    values = [
        next(leaves) if child.kind is None else _build(leaves, child, old)
        for child, old in zip(spec.children, olds, strict=True)
    ]
    if issubclass(kind, list | tuple):
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    items = list(zip(spec.keys, values, strict=True))
    if issubclass(kind, defaultdict):
        return kind(like.default_factory if isinstance(like, defaultdict) else None, items)
    if issubclass(kind, dict):
        return kind(items) if kind in (dict, OrderedDict) else _fill(kind, items)
    return _build_dataclass(kind, dict(items), like)


def _old_children(spec: Spec, like: Any) -> Any:
    """What stood where the new children go: it lends dataclasses and defaultdicts what a spec cannot hold."""
    if like is None:
        return (None,) * len(spec.children)
    if isinstance(like, dict):
        return [like.get(key) for key in spec.keys]
    if isinstance(like, list | tuple):
        return like if len(like) == len(spec.children) else (None,) * len(spec.children)
    return [getattr(like, key, None) for key in spec.keys]


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
