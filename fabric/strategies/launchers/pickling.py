"""Why an object cannot be pickled: the path to the part that cannot, and where that was written.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
import time
import traceback
import types
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.source import is_users, line_name
from fabric.processes.lifeline import describe

if TYPE_CHECKING:
    from collections.abc import Iterator

_SEARCH_S = 10.0
_SHOWN_STEPS = 30
_TABLES = ("_modules", "_parameters", "_buffers")  # of nn.Module: users reach what is in them as attributes
_RUNNING = {"gi_code": "generator", "cr_code": "coroutine", "ag_code": "asynchronous generator"}


class _Sink:
    """A file that keeps nothing: a large model is not in memory twice."""

    def write(self, data: Any) -> int:
        return len(data)


class _Pickler(pickle.Pickler):
    def __init__(self, tensors: bool) -> None:
        super().__init__(_Sink())
        self.tensors = tensors

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


def can_pickle(obj: Any) -> bool:
    """Whether `pickle.dumps(obj)` works."""
    return _error(obj, tensors=True) is None


def interactive_name(obj: Any) -> str | None:
    """The first function or class of `__main__` that a pickle of `obj` names. None where there is none."""
    finder = _MainFinder(_Sink())
    with contextlib.suppress(Exception):  # what cannot be pickled at all is explained elsewhere
        finder.dump(obj)
    return finder.found


def explain_unpicklable(obj: Any, name: str) -> str:
    """`model.head.act: <lambda> at train.py:12`: the innermost part of `obj` that cannot be pickled.

    Args:
        obj: An object that `pickle.dumps` refuses.
        name: What its owner calls it.
    """
    search = _Search(tensors=_error(obj, tensors=False) is None)
    try:
        steps, owners, culprit, by_name = search.find(obj, (), ()) or ((), (), obj, False)
    except TimeoutError:
        return f"{name}: {_kind(obj)}"
    except RecursionError:
        return f"{name}: nested too deeply for pickle"
    if len(steps) > _SHOWN_STEPS:
        steps = (*steps[:5], " ... ", *steps[-5:])
    path, cls = f"{name}{''.join(steps)}: ", type(culprit)
    if by_name:
        unknown = f", a class{_class_at(cls)} that cannot be imported by that name"
        return f"{path}{_kind(culprit)}{'' if '<locals>' in cls.__qualname__ else unknown}"
    return path + _describe(culprit, _error(culprit, search.tensors), owners)


def _error(obj: Any, tensors: bool) -> Exception | None:
    try:
        _Pickler(tensors).dump(obj)
    except Exception as error:  # pickle's own errors, and whatever a user's __getstate__ or __reduce__ raises
        return error
    return None


class _Found(NamedTuple):
    steps: tuple[str, ...]
    owners: tuple[type, ...]
    """The classes of objects on the way of which the next step is an attribute."""
    culprit: Any
    by_name: bool
    """Whether its class is what pickle refuses."""


class _Search:
    """Depth first, into the parts that cannot be pickled, until none of something's parts is to blame."""

    def __init__(self, tensors: bool) -> None:
        self.tensors = tensors
        self._deadline = time.monotonic() + _SEARCH_S
        self._seen: dict[int, Any] = {}

    def find(self, obj: Any, steps: tuple[str, ...], owners: tuple[type, ...]) -> _Found | None:
        """The culprit; None if all that leads to it is being searched already."""
        self._seen[id(obj)], cycle = obj, False
        for step, part in _parts(obj):
            if not self._refuses(part):
                continue
            if part is type(obj):
                return _Found(steps, owners, obj, True)
            cycle = cycle or id(part) in self._seen
            inside = (*owners, type(obj)) if step[0] == "." else owners
            if id(part) not in self._seen and (found := self.find(part, (*steps, step), inside)):
                return found
        return None if cycle else _Found(steps, owners, obj, False)

    def _refuses(self, part: Any) -> bool:
        if time.monotonic() > self._deadline:
            raise TimeoutError
        error = _error(part, self.tensors)
        if isinstance(error, RecursionError):
            raise error
        return error is not None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """What pickle takes of an object, each with the way to it as it is written."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f" (the key {key!r})", key
            yield f"[{key!r}]", value
    elif isinstance(obj, list | tuple | set | frozenset | deque):
        fields = dict(enumerate(getattr(obj, "_fields", ())))
        yield from ((f".{fields[i]}" if fields else f"[{i}]", item) for i, item in enumerate(obj))
    try:
        function, arguments, *more = obj.__reduce_ex__(4)
        state, arguments = more[0] if more else None, tuple(arguments)
    except Exception:  # it refuses, or is no more than a name
        return
    if type(obj) in (function, *arguments[:1]):
        yield "", type(obj)
    whole = _attribute(obj, arguments)
    if getattr(function, "__name__", "") == "__newobj_ex__":
        arguments = (*arguments[1], *arguments[2].values())
    taken: dict[str, Any] = (
        {".__reduce__()[1]": arguments} if whole else _numbered(".__reduce__()[1]", arguments)
    )
    if isinstance(state, tuple) and len(state) == 2 and not hasattr(obj, "__setstate__"):
        taken |= {"attributes": state[0], "slots": state[1]}
    elif isinstance(state, tuple | list) and not _attribute(obj, state):
        taken |= _numbered(".__reduce__()[2]", state)
    else:
        taken[".__reduce__()[2]"] = state
    for step, part in taken.items():
        name = _attribute(obj, part)
        if isinstance(part, dict) and (
            part is state or name == "__dict__" or step in ("attributes", "slots")
        ):
            yield from _attributes(part)
        elif part is not type(obj):
            yield f".{name}" if name else step, part


def _numbered(step: str, parts: tuple[Any, ...] | list[Any]) -> dict[str, Any]:
    return {f"{step}[{index}]": part for index, part in enumerate(parts)}


def _attributes(table: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if name in _TABLES and isinstance(value, dict):  # `._modules['head']` is `.head`, `['0']` is `[0]`
            yield from (
                (f"[{key}]" if str(key).isdigit() else f".{key}", part) for key, part in value.items()
            )
        else:
            yield f".{name}", value


def _attribute(owner: Any, part: Any) -> str:
    """The name of what is kept outside of __dict__, too, such as `func` of functools.partial."""
    kept = (types.MemberDescriptorType, types.GetSetDescriptorType)  # never properties: they run code
    names = [n for cls in type(owner).__mro__ for n, value in vars(cls).items() if isinstance(value, kept)]
    for name in (*getattr(owner, "__dict__", ()), *names):
        with contextlib.suppress(Exception):  # a descriptor that refuses
            if part is not None and getattr(owner, name, None) is part:
                return str(name)
    return ""


# the culprit


def _describe(culprit: Any, error: Exception | None, owners: tuple[type, ...]) -> str:
    if isinstance(culprit, types.FunctionType):
        return _describe_function(culprit)
    if isinstance(culprit, type):
        name = f"{culprit.__module__}.{culprit.__qualname__}"
        return f"the class {name}{_class_at(culprit)}, which cannot be imported by that name"
    for attribute, kind in _RUNNING.items():
        code = getattr(culprit, attribute, None)
        if isinstance(code, types.CodeType):
            return f"the {kind} {code.co_name} at {line_name(code.co_filename, code.co_firstlineno)}"
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    hooks = [frame.name for frame in frames if frame.filename != __file__]
    raised = f", whose {hooks[0]} raises {describe(error)}" if hooks and error else ""
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
