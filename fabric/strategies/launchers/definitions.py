"""Where a class and its attributes are written down, by the source: for errors that name lines.

Imports no torch.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import types
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Line(NamedTuple):
    """A line of a source file."""

    filename: str
    lineno: int


def function_line(function: types.FunctionType) -> Line:
    """Where a function was written, also below decorators that keep `__wrapped__`."""
    code = getattr(inspect.unwrap(function), "__code__", function.__code__)
    return Line(code.co_filename, code.co_firstlineno)


def class_line(cls: type) -> Line | None:
    """The line `class Net(...)`; None for what is not written in Python."""
    found = _definition(cls)
    return Line(found[0], found[1].lineno) if found else None


def set_line(cls: type, attribute: str) -> Line | None:
    """The first `self.attribute = ...` in a method (in `__init__`, if there is one), or a field so named."""
    for base in cls.__mro__:
        found = _definition(base)
        lines = sorted(_assignments(found[1], attribute)) if found else []
        if found and lines:
            return Line(found[0], lines[0][1])
    return None


def _assignments(definition: ast.ClassDef, attribute: str) -> Iterator[tuple[bool, int]]:
    """(not in `__init__`, line) of everything in a class that sets an attribute."""
    for part in definition.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            first = [argument.arg for argument in (*part.args.posonlyargs, *part.args.args)][:1]
            for node in ast.walk(part):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    mine = isinstance(node.value, ast.Name) and [node.value.id] == first
                    if mine and node.attr == attribute:
                        yield part.name != "__init__", node.lineno
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            if attribute in [target.id for target in targets if isinstance(target, ast.Name)]:
                yield True, part.lineno


def _definition(cls: type) -> tuple[str, ast.ClassDef] | None:
    """The file and the syntax of a class. Where several have its name, the one with its methods."""
    # By its methods' code: inspect.getsource cannot find the classes of a notebook before Python 3.13.
    codes = [value.__code__ for value in vars(cls).values() if isinstance(value, types.FunctionType)]
    places = [Line(code.co_filename, code.co_firstlineno) for code in codes]
    for filename, lineno in (*places, *_file_of(cls)):
        same = [node for node in _classes(filename) if node.name == cls.__name__]
        around = [node for node in same if node.lineno <= lineno <= (node.end_lineno or node.lineno)]
        if around or (same and not lineno):
            return filename, (around or same)[-1]
    return None


def _file_of(cls: type) -> list[Line]:
    try:
        return [Line(inspect.getfile(cls), 0)]
    except (TypeError, OSError):  # built in, or of a notebook
        return []


def _classes(filename: str) -> list[ast.ClassDef]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):  # not Python, or a cell with magics
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
