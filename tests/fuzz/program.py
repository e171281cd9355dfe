"""A program as a tree of lines, and as the text of a script that stands alone."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass, replace
from typing import TypeAlias

import idioms
import models
import oracle
from layouts import BY_NAME, Layout

Node: TypeAlias = "str | tuple[str, tuple[Node, ...]]"
"""A line, or a line that ends in a colon with those below it; with "" for that line, lines that belong
together (try, except); with a comment, lines of which none can be left out."""

UNEQUAL_CALLS = "range(1 + rank)"  # ranks evaluate other numbers of batches
DIFFER = "# ranks differ"
"""Over lines that do other things on each rank, or behind one."""
ORDER = ":: -1 if fabric.global_rank == 1 else 1"
"""The order of two models' calls: ranks differ in it."""
WARNED = "# a warning is owed"
"""Over a step whose numbers are others on several ranks, of which the package warns."""

HEADER = '''"""{title}

Run it: {run}. It prints where {world} ranks of {layout} differ from plain torch in one process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import tempfile
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import grad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torchmetrics import MeanMetric

from fabric import Fabric
from fabric.core.backward_listeners import add_backward_listener, add_step_listener
from fabric.core.errors import RankError
from fabric.strategies import *
from fabric.strategies import ContextParallel
'''

MAIN = """

def make_fabric():
    return Fabric(
        accelerator="cpu", devices={devices}, strategy={make}, precision={precision!r}{extra}
    )
"""

SCRIPT = """

if __name__ == "__main__":
    folder = Path(os.environ.setdefault("FUZZ_FOLDER", tempfile.mkdtemp()))
    mine = run_on_rank(program, make_fabric, folder, PRECISION)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.save(mine, folder / f"notes-{{rank}}.pt")
    if dist.is_initialized():
        dist.barrier()
    if rank == 0:
        private = folder / "plain"
        private.mkdir(exist_ok=True)
        want, plain = run_plain(program, private, {ranks}, PRECISION, {replicas})
        files = [folder / f"notes-{{r}}.pt" for r in range({first}, {world})]
        by_rank = [torch.load(file, weights_only=False) for file in files]
        print("\\n".join(differences(want, by_rank, PRECISION)) or "equal")
"""


@dataclass(frozen=True)
class Program:
    """Lines of `def program(fabric, note, folder)`, and under what they run."""

    seed: int
    layout: str
    world: int
    precision: str | None
    lines: tuple[Node, ...]
    then: Program | None = None
    """What goes on in the same folder, in other processes."""

    @property
    def parts(self) -> tuple[Program, ...]:
        """It, and what goes on."""
        return (self, *(self.then.parts if self.then else ()))

    @property
    def name(self) -> str:
        """The layouts of all parts, as `generate` takes them."""
        return ":".join(part.layout for part in self.parts)

    @property
    def place(self) -> Layout:
        return BY_NAME[self.layout]

    @property
    def ranks(self) -> int:
        """How many ranks run the program."""
        return self.world - self.place.idle

    @property
    def replicas(self) -> int:
        """How many parts the joined batch has."""
        name = self.layout.removesuffix("-scaled")
        return {
            "pipeline": 1, "pipeline-rows": 2, "tensor": 1, "tensor-data": 2, "dp": 1,
            "context": self.world // 2, "context-fsdp": self.world // 2,
        }.get(name, self.ranks)  # fmt: skip

    @property
    def avoided(self) -> bool:
        """Whether a part says what means something else under its layout."""
        return any(part.place.avoids and re.search(part.place.avoids, part.body()) for part in self.parts)

    @property
    def text(self) -> str:
        """The lines of all parts."""
        return "\n".join([part.body() for part in self.parts])

    def body(self) -> str:
        """`def program` alone, of this part."""
        return "def program(fabric, note, folder):\n" + "\n".join(written(self.lines, 1)) + "\n"

    def main(self) -> str:
        """The program, and how its Fabric is made: what the pool's ranks execute."""
        devices = self.world if self.place.devices is None else self.place.devices
        place = self.place
        made = MAIN.format(devices=devices, make=place.make, precision=self.precision, extra=place.extra)
        return f"{self.place.imports}\n{self.body()}\n{self.place.before}\n{made}"

    def scripts(self, title: str = "A fuzzed program.", name: str = "failing") -> dict[str, str]:
        """Files that stand alone, by name, one of each part: those of two run in one FUZZ_FOLDER."""
        names = [name + "-then" * place + ".py" for place in range(len(self.parts))]
        run = "; ".join(f"python {file}" for file in names)
        if self.then:
            run = f"export FUZZ_FOLDER=$(mktemp -d); {run}"
        return {file: part._script(title, run) for file, part in zip(names, self.parts, strict=True)}

    def _script(self, title: str, run: str) -> str:
        header = HEADER.format(title=title, run=run, world=self.world, layout=self.layout)
        header = "\n".join([*header.splitlines(), f"PRECISION = {self.precision!r}\n"])
        main, used = self.main(), needed(self.main())
        support = (
            f"\n\n# The models\n\n{used}\n\n# The oracle: tests/fuzz/oracle.py\n\n{without_imports(oracle)}"
        )
        first = self.place.idle
        end = SCRIPT.format(first=first, world=self.world, ranks=self.ranks, replicas=self.replicas)
        return "\n".join([header, main, support, end])

    def with_lines(self, lines: tuple[Node, ...]) -> Program:
        return replace(self, lines=lines)


def written(lines: tuple[Node, ...], depth: int) -> list[str]:
    """Indented text; an empty block says `pass`."""
    text = []
    for node in lines:
        head, below = (node, None) if isinstance(node, str) else node
        if head:
            text.append("    " * depth + head)
        if not head or head.startswith("#"):
            text += written(below or (), depth)
            continue
        if below is not None:
            text += written(below, depth + 1) or ["    " * (depth + 1) + "pass"]
    return text


def needed(text: str) -> str:
    """The text of the models that a program names, with what those name."""
    source = f"{inspect.getsource(models)}\n{inspect.getsource(idioms)}"
    pieces = {}
    for node in ast.parse(source).body:
        names = [getattr(node, "name", None)]
        if isinstance(node, ast.AnnAssign):
            names = [node.target.id]
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        for name in filter(None, names):
            pieces[name] = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
    wanted: list[str] = []
    queue = [text]
    while queue:
        words = set(re.findall(r"\w+", queue.pop()))
        new = [name for name in pieces if name in words and name not in wanted]
        wanted += new
        queue += [pieces[name] for name in new]
    return "\n\n\n".join(pieces[name] for name in pieces if name in wanted)


def without_imports(module: object) -> str:
    """A module's text from its first statement on that imports nothing."""
    source = inspect.getsource(module)  # type: ignore[arg-type]
    body = ast.parse(source).body
    first = next(node for node in body[1:] if not isinstance(node, ast.Import | ast.ImportFrom))
    return "\n".join(source.splitlines()[first.lineno - 1 :])
