"""Why an object cannot be pickled: the path to the attribute that cannot, and the line that made it so.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
import traceback
import types
from collections import deque
from typing import TYPE_CHECKING, Any

from fabric.strategies.launchers.definitions import class_line, function_line, set_line
from fabric.utilities.lifeline import describe
from fabric.utilities.source import is_users, line_name

if TYPE_CHECKING:
    from fabric.strategies.launchers.definitions import Line

_SEARCH_S = 10.0
_SHOWN_STEPS = 30
# nn.Module keeps children, parameters and buffers in these; users reach them as plain attributes.
_TABLES = ("_modules", "_parameters", "_buffers", "__dict__")
_RUNNING = {"gi_code": "generator", "cr_code": "coroutine", "ag_code": "asynchronous generator"}


class _Sink:
    """A file that keeps nothing: a large model is not in memory twice."""

    def write(self, data: Any) -> int:
        return len(data)


def can_pickle(obj: Any) -> bool:
    """Whether `pickle.dumps(obj)` works."""
    try:
        pickle.Pickler(_Sink()).dump(obj)
    except Exception:  # pickle's own errors, and whatever a user's __getstate__ or __reduce__ raises
        return False
    return True


def explain_unpicklable(obj: Any, name: str) -> str:
    """`model.head.act: <lambda> at train.py:12`: the innermost part of `obj` that cannot be pickled.

    Args:
        obj: An object that `pickle.dumps` refuses.
        name: What its owner calls it.
    """
    trail, error = _refused(obj, tensors=False)
    if error is None:  # then it is a tensor
        trail, error = _refused(obj, tensors=True)
    if error is None or isinstance(error, TimeoutError):
        return f"{name}: {_kind(obj)}"
    steps, culprit = _path(trail)
    path = _shorten(name, [step for _, _, step in steps])
    if isinstance(error, RecursionError):
        return f"{path}: nested too deeply for pickle ({len(steps)} levels)"
    if trail[-1].obj is type(culprit):
        return f"{path}: {_kind(culprit)}{_unknown(type(culprit))}"
    owners = [(type(owner), attribute) for owner, attribute, _ in steps if attribute]
    return f"{path}: {_describe(culprit, error, owners)}"


def interactive_name(obj: Any) -> str | None:
    """The first function or class of `__main__` that a pickle of `obj` names. None where there is none."""
    finder = _MainFinder(_Sink())
    with contextlib.suppress(Exception):  # what cannot be pickled at all is explained elsewhere
        finder.dump(obj)
    return finder.found


class _MainFinder(pickle.Pickler):
    found: str | None = None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType | type) and obj.__module__ == "__main__":
            importable = "<" not in obj.__qualname__  # no lambda, nothing local: those pickle nowhere
            self.found = self.found or (obj.__qualname__ if importable else None)
        return NotImplemented


class _Visit:
    """An object that pickle has begun, with the arguments and the state that stand for it."""

    __slots__ = ("arguments", "made", "obj", "state")

    def __init__(self, obj: Any) -> None:
        self.obj, self.arguments, self.state = obj, (), None
        self.made: list[Any] = []
        """Containers that exist only for pickle: of arguments, of attributes."""

    def made_for(self, container: Any) -> bool:
        cut = type(container) is tuple and _same(container, self.arguments[1:])  # without the class
        made = cut or any([container is one for one in self.made])
        return made and _attribute_of(self.obj, container) in ("", "__dict__")


class _Walk(pickle._Pickler):
    """Pickle itself, in Python, with a trail: after an error it ends at the object that was refused."""

    def __init__(self, tensors: bool) -> None:
        super().__init__(_Sink())
        self.trail: list[_Visit] = []
        self.tensors = tensors
        self.deadline = time.monotonic() + _SEARCH_S

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if time.monotonic() > self.deadline:
            raise TimeoutError
        self.trail.append(_Visit(obj))
        super().save(obj, save_persistent_id)  # type: ignore[misc]
        self.trail.pop()

    def save_reduce(self, func: Any, args: Any, state: Any = None, *more: Any, **named: Any) -> None:
        visit = self.trail[-1]
        visit.arguments, visit.state = args if isinstance(args, tuple) else (), state
        parts = [args, state]
        if isinstance(state, tuple) and len(state) == 2 and not hasattr(visit.obj, "__setstate__"):
            parts += state  # attributes, slots
        if getattr(func, "__name__", "") == "__newobj_ex__":
            parts += visit.arguments[1:]
        visit.made = [part for part in parts if type(part) in (tuple, list, dict)]
        super().save_reduce(func, args, state, *more, **named)  # type: ignore[misc]

    def reducer_override(self, obj: Any) -> Any:
        # Plain tensors always pickle, and their data would take most of the time.
        return NotImplemented if self.tensors or not _is_plain_tensor(obj) else (int, ())


def _refused(obj: Any, tensors: bool) -> tuple[list[_Visit], Exception | None]:
    """The way to what pickle refuses, and its error."""
    walk, limit = _Walk(tensors), sys.getrecursionlimit()
    sys.setrecursionlimit(8 * limit)  # this pickle takes several frames where the one in C takes one
    try:
        walk.dump(obj)
    except Exception as error:
        return walk.trail, error
    finally:
        sys.setrecursionlimit(limit)
    return [], None


def _is_plain_tensor(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter) and not obj.__dict__


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all([a is b for a, b in zip(one, other, strict=True)])


# the path


def _path(trail: list[_Visit]) -> tuple[list[tuple[Any, str, str]], Any]:
    """(owner, attribute or "", step as it is written) down to the culprit, and the culprit."""
    owner, container = trail[0], None
    steps: list[tuple[Any, str, str]] = []
    for visit in trail[1:]:
        if owner.made_for(visit.obj):
            container = visit.obj
            continue
        if visit.obj is type(owner.obj) and container is None:
            break  # the class itself is refused: what counts is the object of it
        attribute, step = _step(owner, container, visit.obj)
        in_table = steps and steps[-1][1] in _TABLES and isinstance(owner.obj, dict)
        if in_table:  # `._modules['head']` is `.head`, `._modules['0']` is `[0]`
            table_owner, attribute = steps.pop()[0], str(_key_of(owner.obj, visit.obj))
            steps.append(
                (table_owner, attribute, f"[{attribute}]" if attribute.isdigit() else f".{attribute}")
            )
        else:
            steps.append((owner.obj, attribute, step))
        owner, container = visit, None
    return steps, owner.obj


def _step(visit: _Visit, container: Any, child: Any) -> tuple[str, str]:
    """The attribute of an object (or "") that is `child`, and how to write the way to it."""
    owner = visit.obj
    if type(container) is dict:
        name = str(_key_of(container, child))
        return name, f".{name}"
    if container is None and isinstance(owner, dict):
        key = _key_of(owner, child)
        return "", f" (the key {child!r})" if key is _NO_KEY else f"[{key!r}]"
    if isinstance(owner, list | tuple | set | frozenset | deque) and (index := _index_of(owner, child)):
        fields = dict(enumerate(getattr(owner, "_fields", ())))
        return "", f".{fields[int(index[1:-1])]}" if fields else index
    if name := _attribute_of(owner, child):
        return name, f".{name}"
    parts = {1: visit.arguments, 2: visit.state if isinstance(visit.state, tuple | list) else ()}
    found = [f"[{place}]{index}" for place, part in parts.items() if (index := _index_of(part, child))]
    return "", f".__reduce__(){found[0] if found else '[0]'}"


_NO_KEY = object()


def _key_of(table: Any, child: Any) -> Any:
    return next((key for key, value in table.items() if value is child), _NO_KEY)


def _index_of(items: Any, child: Any) -> str:
    return next((f"[{index}]" for index, value in enumerate(items) if value is child), "")


def _attribute_of(owner: Any, child: Any) -> str:
    """The name of what is kept outside of __dict__, such as `func` of functools.partial."""
    kept = (types.MemberDescriptorType, types.GetSetDescriptorType)  # never properties: they run code
    names = [n for cls in type(owner).__mro__ for n, value in vars(cls).items() if isinstance(value, kept)]
    for name in (*getattr(owner, "__dict__", ()), *names):
        try:
            if getattr(owner, name, None) is child:
                return str(name)
        except Exception:  # a descriptor that refuses
            continue
    return ""


def _shorten(name: str, steps: list[str]) -> str:
    if len(steps) > _SHOWN_STEPS:
        steps = [*steps[:5], " ... ", *steps[-5:]]
    return name + "".join(steps)


# the culprit


def _describe(culprit: Any, error: Exception, owners: list[tuple[type, str]]) -> str:
    if isinstance(culprit, types.FunctionType):
        return _describe_function(culprit)
    if isinstance(culprit, type):
        name = f"{culprit.__module__}.{culprit.__qualname__}"
        return f"the class {name}{_at(class_line(culprit))}, which cannot be imported by that name"
    for attribute, kind in _RUNNING.items():
        code = getattr(culprit, attribute, None)
        if isinstance(code, types.CodeType):
            return f"the {kind} {code.co_name} at {line_name(code.co_filename, code.co_firstlineno)}"
    hook = _hook(error)
    raised = f", whose {hook} raises {describe(error)}" if hook else ""
    return f"{_kind(culprit)}{raised}{_set_at(owners)}"


def _describe_function(function: types.FunctionType) -> str:
    where = _at(function_line(function))
    if function.__name__ == "<lambda>":
        return f"<lambda>{where}"
    if "<locals>" in function.__qualname__:
        return f"the local function {function.__qualname__}{where}"
    name = f"{function.__module__}.{function.__qualname__}"
    return f"the function {function.__qualname__}{where}, but {name} is not that function"


def _kind(obj: Any) -> str:
    kind = type(obj)
    if "<locals>" in kind.__qualname__:
        return f"an object of the local class {kind.__qualname__}{_at(class_line(kind))}"
    return f"an object of {kind.__module__}.{kind.__qualname__}"


def _unknown(cls: type) -> str:
    """Why pickle refuses a class: a local one cannot be imported, which its name says."""
    if "<locals>" in cls.__qualname__:
        return ""
    return f", a class{_at(class_line(cls))} that cannot be imported by that name"


def _at(line: Line | None) -> str:
    return f" at {line_name(*line)}" if line else ""


def _hook(error: Exception) -> str:
    """The method of the object that raised, `__getstate__` or the like; "" if pickle itself did."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.name for frame in frames if frame.filename not in (__file__, pickle.__file__)), "")


def _set_at(owners: list[tuple[type, str]]) -> str:
    """`, set at train.py:14`: the innermost line of the user that sets an attribute on the path."""
    inwards = dict.fromkeys(reversed(owners))
    for cls, attribute in inwards:
        line = set_line(cls, attribute)
        if line is not None and is_users(line.filename):
            whose = "" if attribute == owners[-1][1] else f".{attribute} "
            return f", {whose}set at {line_name(*line)}"
    # No method sets it: then the class of the object that has it.
    for cls, _ in inwards:
        line = class_line(cls)
        if line is not None and is_users(line.filename):
            return f", in a {cls.__name__} (class{_at(line)})"
    return ""
