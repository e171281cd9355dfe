"""Flatten nestings of dict, list, tuple, namedtuple and dataclass to a list of leaves and a spec.

Used by collectives, data transfer and dtype conversion. Sets, strings, tensors and other objects are leaves.
"""

from __future__ import annotations

import dataclasses
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Spec(NamedTuple):
    """Structure of a tree without its leaves. `kind` is None for a leaf. Compares and pickles by value.

    A constant has its type as `kind` and its value as the only key: see `flatten`.
    """

    kind: type | None
    keys: tuple[Any, ...]
    children: tuple[Spec, ...]


LEAF = Spec(None, (), ())
CONSTANTS = (str, bytes, type(None))
"""Types of values that belong to a tree's structure in calls that expect tensors."""
_CONTAINERS = (dict, list, tuple)  # tuples of types: torch.compile cannot trace `dict | list`
_SEQUENCES = (list, tuple)


def flatten(tree: Any, constants: tuple[type, ...] = ()) -> tuple[list[Any], Spec]:
    """Return the leaves of `tree` in order (dict entries in insertion order) and the spec for `unflatten`.

    Values in containers whose type is one of `constants` are part of the spec, and are not leaves.
    """
    leaves: list[Any] = []
    return leaves, _flatten_into(tree, leaves, constants)


def unflatten(leaves: list[Any], spec: Spec, like: Any = None) -> Any:
    """Return a new tree of the same types with these leaves; containers copy attributes of `like`, the
    original.
    """
    return _build(iter(leaves), spec, like)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with `function` applied to every leaf; a tree of one leaf costs one call."""
    if not is_node(tree):
        return function(tree)
    leaves, spec = flatten(tree)
    return unflatten([function(leaf) for leaf in leaves], spec, tree)


def is_node(tree: Any) -> bool:
    """Whether `tree` is a container that `flatten` looks into."""
    return isinstance(tree, _CONTAINERS) or (dataclasses.is_dataclass(tree) and not isinstance(tree, type))


def iter_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path as an expression: `.blocks[3].weight`, `['a'][0]`."""
    if not is_node(tree):
        yield path, tree
        return
    for key, child in children(tree):
        yield from iter_paths(child, f"{path}{step_to(tree, key)}")


def step_to(tree: Any, key: Any) -> str:
    """Return the expression that reaches a child of `tree`: `.key` or `[key]`."""
    return f".{key}" if not isinstance(tree, _CONTAINERS) else f"[{key!r}]"


def children(tree: Any) -> list[tuple[Any, Any]]:
    """Return the children of a node, each with its key, index or name."""
    if isinstance(tree, dict):
        return list(tree.items())
    if isinstance(tree, _SEQUENCES):
        return list(enumerate(tree))
    return [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree) if hasattr(tree, f.name)]


def _flatten_into(tree: Any, leaves: list[Any], constants: tuple[type, ...]) -> Spec:
    # One Python call per container, none per leaf: large trees would cost a call per tensor.
    if isinstance(tree, dict):
        keys, children = tuple(tree), list(tree.values())
    elif isinstance(tree, _SEQUENCES):
        keys, children = (), list(tree)
    elif hasattr(type(tree), "__dataclass_fields__") and not isinstance(tree, type):
        keys = tuple([f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name)])
        children = [getattr(tree, key) for key in keys]
    else:
        leaves.append(tree)
        return LEAF
    specs, known = [], None
    for child in children:
        kind = type(child)  # neighbouring leaves mostly have one type
        if kind is known:
            leaves.append(child)
            specs.append(LEAF)
        elif isinstance(child, _CONTAINERS) or hasattr(kind, "__dataclass_fields__"):
            specs.append(_flatten_into(child, leaves, constants))
        elif kind in constants:
            specs.append(Spec(kind, (child,), ()))
        else:
            known = kind
            leaves.append(child)
            specs.append(LEAF)
    return Spec(type(tree), keys, tuple(specs))


def _build(leaves: Iterator[Any], spec: Spec, like: Any) -> Any:
    kind = spec.kind
    if kind is None:
        return next(leaves)
    if kind in CONSTANTS:
        return spec.keys[0]
    olds = _old_children(spec, like)
    values = [
        next(leaves) if child.kind is None else _build(leaves, child, old)
        for child, old in zip(spec.children, olds, strict=True)
    ]
    if issubclass(kind, tuple):
        return _build_tuple(kind, values, like)
    if issubclass(kind, list):
        return values if kind is list else _refill(kind, list(enumerate(values)), like)
    items = list(zip(spec.keys, values, strict=True))
    if issubclass(kind, dict):
        return dict(items) if kind is dict else _refill(kind, items, like)
    return _build_dataclass(kind, dict(items), like)


def _old_children(spec: Spec, like: Any) -> Any:
    """Return the children of `like` at the positions of the new ones.

    Dataclasses and defaultdicts are copied from them, with the attributes that a spec lacks.
    """
    if like is None:
        return (None,) * len(spec.children)
    if isinstance(like, dict):
        return [like.get(key) for key in spec.keys]
    if isinstance(like, _SEQUENCES):
        return like if len(like) == len(spec.children) else (None,) * len(spec.children)
    return [getattr(like, key, None) for key in spec.keys]


def _build_tuple(kind: type, values: list[Any], like: Any) -> Any:
    if kind is tuple:
        return tuple(values)
    make = getattr(kind, "_make", kind)  # a namedtuple's __new__ may be the user's own
    try:
        made = make(values)
    except TypeError:
        made = tuple.__new__(kind, values)
    if hasattr(like, "__dict__") and hasattr(made, "__dict__"):
        vars(made).update(vars(like))
    return made


def _refill(kind: Any, items: list[tuple[Any, Any]], like: Any) -> Any:
    """Return a container of a user's class. Its constructor, whose arguments are unknown, is not called."""
    if type(like) is kind and len(like) == len(items):  # `like` is the original, so the keys are equal
        made = copy(like)  # keeps attributes, default_factory and the like
    else:
        made = kind.__new__(kind)
        if issubclass(kind, list):
            made.extend([None] * len(items))
    for key, value in items:
        made[key] = value
    return made


def _build_dataclass(kind: type, values: dict[str, Any], like: Any) -> Any:
    # Without __init__: a user's __post_init__ may check or change fields, and init=False fields exist.
    made: Any = object.__new__(kind)
    for name, value in {**getattr(like, "__dict__", {}), **values}.items():
        object.__setattr__(made, name, value)
    return made
