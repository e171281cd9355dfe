"""How much code there is, and how much of it a run meets: lines, modules, private names of torch, the README.

A line of code is one that holds a token that is no comment and no docstring.
"""

from __future__ import annotations

import ast
import atexit
import io
import multiprocessing.util
import os
import re
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from harness import HERE, child, show, table

ROOT = HERE.parent
FABRIC = ROOT / "fabric"
APART = ("integrations", "testing", "tools")
LOOP = """
import json, sys, tempfile, threading
import torch
ran = set()
def note(frame, event, argument):
    name = frame.f_globals.get("__name__", "")
    if event == "call" and name.partition(".")[0] == "fabric":
        ran.add((name, frame.f_code.co_firstlineno))
sys.setprofile(note)
threading.setprofile(note)
from torch.utils.data import DataLoader, TensorDataset
from fabric import Fabric

fabric = Fabric(accelerator="cpu", devices={devices}, strategy="{strategy}")
fabric.launch()
model = torch.nn.Linear(4, 2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2))
for (x,) in loader:
    optimizer.zero_grad()
    fabric.backward(model(x).sum())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
fabric.all_reduce(torch.ones(2))
path = fabric.broadcast(tempfile.mkdtemp()) + "/state.pt"
state = {{"model": model, "optimizer": optimizer, "step": 4}}
fabric.save(path, state)
fabric.load(path, state)
sys.setprofile(None)
if fabric.is_global_zero:
    names = [n for n in sys.modules if n.partition(".")[0] == "fabric"]
    print("BENCH-RESULT " + json.dumps({{n: [line for name, line in ran if name == n] for n in names}}))
"""
VERBS = """
import json, sys
import torch
from fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
passed = set()
def note(frame, event, argument):
    name = frame.f_globals.get("__name__", "")
    if event == "call" and name.startswith("fabric."):
        passed.add(name)
def through(call):
    call()
    passed.clear()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(passed)
tree = {"a": torch.ones(3), "b": [torch.ones(2), 1.0]}
found = {"all_reduce(tree)": through(lambda: fabric.all_reduce(tree))}
import torchmetrics
metric = torchmetrics.MeanMetric()
metric.update(1.0)
found["compute_metrics"] = through(lambda: fabric.compute_metrics(metric))
if fabric.is_global_zero:
    print("BENCH-RESULT " + json.dumps(found))
"""


def code(path: Path) -> set[int]:
    """The lines of a file that hold code."""
    text = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skipped |= {tokenize.ENDMARKER, tokenize.ENCODING}
    strings = docstrings(ast.parse(text))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.start not in strings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def code_lines(path: Path) -> int:
    """How many these are."""
    return len(code(path))


def docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Where expressions that are only a string begin."""
    return {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def file_of(name: str) -> Path:
    """Where a module stands."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"


def of_modules(names: Iterable[str]) -> int:
    """The lines of code of these modules."""
    return sum(code_lines(file_of(name)) for name in names)


def executed(name: str, first_lines: list[int]) -> tuple[int, int]:
    """Lines of code in functions of a module, and in those that ran, by where these begin."""
    path, called, every = file_of(name), set(), set()
    lines = code(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *[each.lineno for each in node.decorator_list]])
            own = lines & set(range(first, (node.end_lineno or first) + 1))
            every |= own
            called |= own if first in first_lines else set()
    return len(every), len(called)


def loaded(runs: list[dict[str, list[int]]]) -> list[list[str]]:
    """A row for each module: its lines, and for each run those of functions, and of functions that ran."""
    rows = []
    for name in sorted({name for run in runs for name in run}):
        shares = [executed(name, run[name]) if name in run else None for run in runs]
        texts = ["-" if share is None else f"{share[1]} of {share[0]}" for share in shares]
        rows.append([name, str(code_lines(file_of(name))), *texts])
    return rows


def private_names() -> dict[str, set[str]]:
    """Private names neither of the package nor of Python, and torch's private modules, with their files."""
    pythons = (os, sys, atexit, threading, multiprocessing.util)
    own, used = {"_replace", *chain(*map(dir, pythons))}, defaultdict(set)
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FABRIC.rglob("*.py"))}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node):
                own.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                own.add(node.value)  # slots, and marks by name
    for path, tree in trees.items():
        for node in ast.walk(tree):
            where = str(path.relative_to(FABRIC))
            if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
                used[node.attr].add(where)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                for name in (node.module or "").split(".") + [alias.name for alias in node.names]:
                    if is_private(name):
                        used[name].add(where)
    return dict(used)


def is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_private(name: str) -> bool:
    return bool(re.match(r"_[A-Za-z]", name))


def script(text: str) -> Any:
    """What a program reports that starts its own ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(text, encoding="utf-8")
        return child([str(path)], PYTHONPATH=str(ROOT))


def by_slice(files: dict[Path, int]) -> Counter[str]:
    """Code lines of each slice, as `NEEDS` of tests/test_architecture.py lists them, and of the kernel."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_architecture import NEEDS

    found: Counter[str] = Counter()
    for path, lines in files.items():
        parts = path.relative_to(ROOT).with_suffix("").parts
        names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        apart = "integrations" if parts[1] == "integrations" else "kernel"
        found[next((name for name in names if name in NEEDS), apart)] += lines
    return found


def main() -> None:
    files = {path: code_lines(path) for path in FABRIC.rglob("*.py")}
    by_folder: Counter[str] = Counter()
    for path, lines in files.items():
        first = path.relative_to(FABRIC).parts
        by_folder[first[0] if len(first) > 1 else "."] += lines
    whole = sum(lines for folder, lines in by_folder.items() if folder not in APART)
    single = script(LOOP.format(devices=1, strategy="single_device"))
    ddp = script(LOOP.format(devices=2, strategy="ddp"))
    passed, private = script(VERBS), private_names()
    torchs = {
        name for name, found in private.items() if {Path(where).name for where in found} == {"_torch.py"}
    }
    elsewhere = {where for name in private.keys() - torchs for where in private[name]}
    slices = by_slice(files)
    rows = [
        ["kernel, outside of slices", f"{slices['kernel']:,}", "7,500"],
        [
            "code lines of fabric/ without integrations/, testing/ and tools/",
            f"{whole:,}",
            "17,500",
        ],
        ["loaded by a run on 2 ranks (DDP)", f"{of_modules(ddp):,} in {len(ddp)} modules", "7,200 in 80"],
        ["loaded by a run on one device", f"{of_modules(single):,} in {len(single)} modules", "5,300 in 62"],
        *[
            [f"modules that {name} passes", str(len(found)), limit]
            for (name, found), limit in zip(passed.items(), "77", strict=True)
        ],
        ["private names of torch in _torch.py files", str(len(torchs)), "25"],
        ["others (of other packages)", f"{len(private) - len(torchs)} in {len(elsewhere)} files", ""],
        ["README, bytes", f"{(ROOT / 'README.md').stat().st_size:,}", "10,000"],
    ]
    longest = sorted(files.items(), key=lambda item: -item[1])[:12]
    show(
        [
            table("Thinness", ["what", "now", "goal"], rows),
            table(
                "By folder",
                ["folder", "code lines"],
                [[name, f"{lines:,}"] for name, lines in by_folder.most_common()],
            ),
            table(
                "By slice",
                ["slice", "code lines"],
                [[name, f"{lines:,}"] for name, lines in slices.most_common()],
            ),
            table(
                "Longest files",
                ["file", "code lines"],
                [[str(path.relative_to(FABRIC)), str(lines)] for path, lines in longest],
            ),
            table(
                "Loaded modules",
                ["module", "code lines", "in functions that ran, one device", "2 ranks (DDP)"],
                loaded([single, ddp]),
            ),
            table(
                "Private names",
                ["name", "files"],
                [[name, ", ".join(sorted(found))] for name, found in sorted(private.items())],
            ),
        ]
    )


if __name__ == "__main__":
    main()
