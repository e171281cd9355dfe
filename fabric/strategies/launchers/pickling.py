"""Why an object cannot be pickled: the path to the part that cannot, and where that was written.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import pickle
import re
import sys
import traceback
import types
from collections import deque
from typing import TYPE_CHECKING, Any

from fabric.core.source import is_users, line_name
from fabric.processes.lifeline import describe

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHOWN_STEPS = 30
_DEPTH = 5000
"""Frames that the search may take: some seven for each level, so that it comes as deep as pickle in C."""
_IN_TABLE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
"""In an nn.Module: users reach what is in these tables as attributes."""
_RUNNING = {"gi_code": "generator", "cr_code": "coroutine", "ag_code": "asynchronous generator"}


class _Sink:
    """A file that keeps nothing: a large model is not in memory twice."""

    def write(self, data: Any) -> int:
        return len(data)


class _Tracer(pickle._Pickler):  # pickle as it is written in Python: it can be looked at
    """Pickles, and knows the way to what it is at: where it fails, that is the culprit."""

    def __init__(self, tensors: bool) -> None:
        super().__init__(_Sink(), protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors = tensors
        self.way: list[Any] = []

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        self.way.append(obj)
        super().save(obj, save_persistent_id)  # type: ignore[misc]
        self.way.pop()

    def reducer_override(self, obj: Any) -> Any:
        # Plain tensors always pickle, and their data would take most of the time.
        torch = None if self.tensors else sys.modules.get("torch")
        plain = torch and type(obj) in (torch.Tensor, torch.nn.Parameter) and not obj.__dict__
        return (int, ()) if plain else NotImplemented


class _MainFinder(pickle.Pickler):
    found: str | None = None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType | type) and obj.__module__ == "__main__":
            importable = "<" not in obj.__qualname__  # no lambda, nothing local: those pickle nowhere
            self.found = self.found or (obj.__qualname__ if importable else None)
        return NotImplemented


def interactive_name(obj: Any) -> str | None:
    """The first function or class of `__main__` that a pickle of `obj` names. None where there is none."""
    finder = _MainFinder(_Sink())
    with contextlib.suppress(Exception):  # what cannot be pickled at all is explained elsewhere
        finder.dump(obj)
    return finder.found


def explain_unpicklable(obj: Any, name: str) -> str:
    """`model.head.act: <lambda> at train.py:12`: the innermost part that pickle refuses; "": it takes `obj`.

    Args:
        obj: Any object.
        name: What its owner calls it.
    """
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEPTH))
    try:
        for tensors in (False, True):
            tracer = _Tracer(tensors)
            try:
                tracer.dump(obj)
            except Exception as error:  # pickle's own, and what a user's __getstate__ or __reduce__ raises
                return _explain(tracer.way, error, name)
    finally:
        sys.setrecursionlimit(limit)
    return ""


def _explain(way: list[Any], error: Exception, name: str) -> str:
    if isinstance(error, RecursionError):
        return f"{name}: nested too deeply for pickle"
    by_name = len(way) > 1 and way[-1] is type(way[-2])
    way = way[:-1] if by_name else way
    steps = list(_steps(way))
    if len(steps) > _SHOWN_STEPS:
        steps = [*steps[:5], " ... ", *steps[-5:]]
    shown = _IN_TABLE.sub(lambda m: f"[{m[1]}]" if m[1].isdigit() else f".{m[1]}", "".join(steps))
    culprit, cls = way[-1], type(way[-1])
    if by_name:
        unknown = f", a class{_class_at(cls)} that cannot be imported by that name"
        return f"{name}{shown}: {_kind(culprit)}{'' if '<locals>' in cls.__qualname__ else unknown}"
    return f"{name}{shown}: {_describe(culprit, error, [type(owner) for owner in way[:-1]])}"


def _steps(way: list[Any]) -> Iterator[str]:
    """How a person would write the way from its first object to its last."""
    owner, pending = way[0], ""
    for outer, part in itertools.pairwise(way):
        name = _attribute(owner, part)
        if name == "__dict__":
            continue  # its values are attributes
        if name:
            pending = f".{name}"
        else:
            pending += _item(outer, part)
        if name or not isinstance(part, dict | list | tuple):
            yield pending
            owner, pending = part, ""
    yield pending


def _item(outer: Any, part: Any) -> str:
    """The way from a container to what is in it; from another object to what its `__reduce__` gave."""
    if isinstance(outer, dict):
        keys = [key for key, value in outer.items() if value is part]
        return f"[{keys[0]!r}]" if keys else f" (the key {part!r})"
    if isinstance(outer, list | tuple | set | frozenset | deque):
        places = [place for place, item in enumerate(outer) if item is part]
        return f"[{places[0]}]" if places else " (its __reduce__)"
    return " (its __reduce__)"


def _attribute(owner: Any, part: Any) -> str:
    """The name of what is kept outside of __dict__, too, such as `func` of functools.partial."""
    kept = (types.MemberDescriptorType, types.GetSetDescriptorType)  # never properties: they run code
    names = [n for cls in type(owner).__mro__ for n, value in vars(cls).items() if isinstance(value, kept)]
    for name in (*getattr(owner, "__dict__", ()), *getattr(owner, "_fields", ()), *names):
        with contextlib.suppress(Exception):  # a descriptor that refuses
            if getattr(owner, name) is part:
                return str(name)
    return ""


# the culprit


def _describe(culprit: Any, error: Exception, owners: list[type]) -> str:
    if isinstance(culprit, types.FunctionType):
        return _describe_function(culprit)
    if isinstance(culprit, type):
        name = f"{culprit.__module__}.{culprit.__qualname__}"
        return f"the class {name}{_class_at(culprit)}, which cannot be imported by that name"
    for attribute, kind in _RUNNING.items():
        code = getattr(culprit, attribute, None)
        if isinstance(code, types.CodeType):
            return f"the {kind} {code.co_name} at {line_name(code.co_filename, code.co_firstlineno)}"
    frames = traceback.extract_tb(error.__traceback__)
    hooks = [frame.name for frame in frames if frame.filename not in (__file__, pickle.__file__)]
    raised = f", whose {hooks[0]} raises {describe(error)}" if hooks else ""
    for owner in dict.fromkeys(reversed(owners)):  # the innermost of the user's
        if where := _class_at(owner):
            return f"{_kind(culprit)}{raised}, in a {owner.__name__} (class{where})"
    return f"{_kind(culprit)}{raised}"


def _describe_function(function: types.FunctionType) -> str:
    code = getattr(inspect.unwrap(function), "__code__", function.__code__)
    where = f" at {line_name(code.co_filename, code.co_firstlineno)}"
    if function.__name__ == "<lambda>":
        return f"<lambda>{where}"
    if "<locals>" in function.__qualname__:
        return f"the local function {function.__qualname__}{where}"
    name = f"{function.__module__}.{function.__qualname__}"
    return f"the function {function.__qualname__}{where}, but {name} is not that function"


def _kind(obj: Any) -> str:
    kind = type(obj)
    if "<locals>" in kind.__qualname__:
        return f"an object of the local class {kind.__qualname__}{_class_at(kind)}"
    return f"an object of {kind.__module__}.{kind.__qualname__}"


def _class_at(cls: type) -> str:
    """` at train.py:3`, for a class of the user's whose source is known."""
    try:
        filename, lineno = inspect.getfile(cls), inspect.getsourcelines(cls)[1]
    except (TypeError, OSError):  # built in, or (before Python 3.13) of a notebook
        return ""
    return f" at {line_name(filename, lineno)}" if is_users(filename) else ""
