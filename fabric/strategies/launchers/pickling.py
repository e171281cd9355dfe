"""Why an object cannot be pickled: the path to the attribute that cannot, as its owner would write it."""

from __future__ import annotations

import pickle
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_VISITS = 10_000
_PICKLE_ERRORS = (
    pickle.PicklingError,
    TypeError,
    AttributeError,
    RuntimeError,
    ValueError,
    NotImplementedError,
)
# nn.Module keeps children, parameters and buffers in these; users reach them as plain attributes.
_MODULE_TABLES = ("_modules", "_parameters", "_buffers")


def can_pickle(obj: Any) -> bool:
    """Whether `pickle.dumps(obj)` works."""
    try:
        pickle.dumps(obj)
    except _PICKLE_ERRORS:
        return False
    return True


def explain_unpicklable(obj: Any, name: str) -> str:
    """`model.head.act: <lambda> at train.py:12`: the innermost part of `obj` that cannot be pickled.

    Args:
        obj: An object that `pickle.dumps` refuses.
        name: What its owner calls it.
    """
    path, culprit = _find(obj, name, {id(obj)})
    return f"{path}: {_describe(culprit)}"


def _find(obj: Any, path: str, seen: set[int]) -> tuple[str, Any]:
    for step, child in _parts(obj):
        if id(child) in seen or len(seen) > _MAX_VISITS:
            continue
        seen.add(id(child))
        if not can_pickle(child):
            return _find(child, path + step, seen)
    return path, obj


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{key!r}]", value
            yield f" (the key {key!r})", key
    elif isinstance(obj, list | tuple | set | frozenset):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif not isinstance(obj, types.FunctionType | type | types.ModuleType):
        yield from _attributes(obj)


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    state = _state_of(obj)
    for name, value in state.items():
        if name in _MODULE_TABLES and isinstance(value, dict):
            for child, module in value.items():
                yield (f"[{child}]" if child.isdigit() else f".{child}"), module
        else:
            yield f".{name}", value
    for name in ("func", "args", "keywords"):  # functools.partial keeps these outside __dict__
        if name not in state and type(obj).__name__ == "partial":
            yield f".{name}", getattr(obj, name)


def _state_of(obj: Any) -> dict[str, Any]:
    """What pickle would take of `obj`, where that is a dict of attributes."""
    state: Any = None
    if hasattr(type(obj), "__getstate__"):
        try:
            state = obj.__getstate__()
        except Exception:  # a user's __getstate__ may refuse; then look at the attributes themselves
            state = None
    if isinstance(state, tuple) and len(state) == 2:  # (attributes, slots)
        state = {**(state[0] or {}), **(state[1] or {})}
    return dict(state) if isinstance(state, dict) else dict(getattr(obj, "__dict__", {}))


def _describe(obj: Any) -> str:
    if isinstance(obj, types.FunctionType):
        code = obj.__code__
        what = "<lambda>" if obj.__name__ == "<lambda>" else f"the local function {obj.__qualname__}"
        return f"{what} at {Path(code.co_filename).name}:{code.co_firstlineno}"
    if isinstance(obj, type):
        return f"the class {obj.__module__}.{obj.__qualname__}, which cannot be imported by that name"
    kind = type(obj)
    if "<locals>" in kind.__qualname__:
        return f"an object of the local class {kind.__qualname__}"
    return f"an object of {kind.__module__}.{kind.__qualname__}"
