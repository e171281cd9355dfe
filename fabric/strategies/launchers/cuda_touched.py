"""Which line initialised CUDA in this process: noted as it happens, or looked up in the notebook's cells."""

from __future__ import annotations

import ast
import linecache
import sys
import warnings
from typing import TYPE_CHECKING

import torch

from fabric.utilities.source import cell_line, executed_cells, is_users, line_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_HARMLESS = {
    "is_available",
    "is_initialized",
    "device_count",
    "manual_seed",
    "manual_seed_all",
    "empty_cache",
}
"""Of torch.cuda: what leaves CUDA alone, or waits until something else initialises it."""
_NO_TENSORS = {"Fabric", "device", "print"}
"""Calls in which "cuda" is a name only."""
_watching = False
_noted = ""


def watch_cuda() -> None:
    """Have torch note the line that initialises CUDA in this process. Costs nothing; a second call, too."""
    global _watching
    queue = getattr(torch.cuda, "_lazy_call", None)
    if not _watching and queue is not None and not torch.cuda.is_initialized():
        queue(_note)  # torch runs what is queued inside the call that initialises CUDA
        _watching = True


def cuda_line() -> str:
    """`by train.py:12 (model.cuda())`, `probably by cell In[2], line 1 (...)`, or "" if nothing is known."""
    return _noted or _guess()


def _note() -> None:
    global _noted
    try:
        _noted = _place(sys._getframe(1))
    except Exception:  # torch would take it for a failure of CUDA
        _noted = ""


def _place(frame: FrameType | None) -> str:
    """The innermost line of the user, as text: a frame that is kept would keep all of its variables."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    filename, lineno = frame.f_code.co_filename, frame.f_lineno
    return _by(line_name(filename, lineno), linecache.getline(filename, lineno, frame.f_globals))


def _by(where: str, line: str) -> str:
    line = line.strip()
    return f"by {where} ({line})" if line else f"by {where}"


def _guess() -> str:
    """The first line in the notebook's cells that looks like it.

    Lines that ran with their cell come first, then those that choose the device, then those in functions,
    which may not have run.
    """
    cells = executed_cells()
    for nodes, fits in ((_at_once, _touches), (_at_once, _chooses), (ast.walk, _touches)):
        for number, source in enumerate(cells):
            lines = [node.lineno for node in nodes(_parse(source)) if fits(node)]  # type: ignore[attr-defined]
            if lines:
                where = cell_line(number, min(lines))
                return f"probably {_by(where, source.splitlines()[min(lines) - 1])}"
    return ""


def _parse(source: str) -> ast.AST:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the user's code; they came when the cell ran
            tree: ast.AST = compile(source, "<cell>", "exec", flags)
    except (SyntaxError, ValueError):
        return ast.Module([], [])
    return tree


def _at_once(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only run when a function is called."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _at_once(child)


def _touches(node: ast.AST) -> bool:
    """Whether it is `x.cuda()`, a call of torch.cuda, or one that makes or moves something to "cuda"."""
    if not isinstance(node, ast.Call):
        return False
    owner, _, name = ast.unparse(node.func).rpartition(".")
    if owner.endswith("torch.cuda"):
        return name not in _HARMLESS
    values = [*node.args, *[word.value for word in node.keywords]]
    return name == "cuda" or (name not in _NO_TENSORS and any([_names_cuda(value) for value in values]))


def _chooses(node: ast.AST) -> bool:
    """Whether it is `device = "cuda"` or the like."""
    if not isinstance(node, ast.Assign) or (
        isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith("Fabric")
    ):
        return False
    return any([_names_cuda(part) for part in ast.walk(node.value)])


def _names_cuda(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).partition(":")[0] == "cuda"
