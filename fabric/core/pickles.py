"""The path of the part of an object that does not pickle, for error messages. Imports no torch."""

from __future__ import annotations

import pickle
from typing import Any

from fabric.core.tree import children, is_node, step_to


def pickling_error(error: BaseException, obj: Any, name: str) -> str:
    """Return the text of a pickling error with the path of the part that failed: `..., at cfg['a'].lock`."""
    text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])  # Python 3.14
    path, seen = name, {id(obj)}
    while len(path) < 200 and (part := _unpicklable_part(obj, seen)):
        path, obj = path + part[0], part[1]
    return text if path == name else f"{text}, at {path}"


def _unpicklable_part(obj: Any, seen: set[int]) -> tuple[str, Any] | None:
    for step, child in _parts(obj):
        if id(child) not in seen:
            seen.add(id(child))
            try:
                pickle.dumps(child)
            except Exception:
                return step, child
    return None


def _parts(obj: Any) -> list[tuple[str, Any]]:
    """Return the parts that are pickled with `obj`, each with the expression that reaches it."""
    if is_node(obj):
        return [(step_to(obj, key), child) for key, child in children(obj)]
    try:
        state = obj.__getstate__() if hasattr(obj, "__getstate__") else vars(obj)
    except Exception:  # from the user's __getstate__, or an object without attributes
        return []
    states = state if isinstance(state, tuple) else (state,)  # of __dict__ and of __slots__
    return [(f".{key}", child) for each in states if isinstance(each, dict) for key, child in each.items()]
