"""The shape of the package as DESIGN.md states it, computed from the source: imports, sizes, side effects."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

import pytest

from fabric.core import slices
from fabric.core.errors import ConfigurationError

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fabric"

# Level by level, lowest first. A name stands for a module or for all modules below it; the longest counts.
# Modules may import lower levels, and modules that stand under the same name.
ORDER = [
    ["fabric.core"],
    ["fabric.utilities"],
    ["fabric.launch.rank_exit", "fabric.launch.system"],
    ["fabric.launch.store_process"],
    [
        "fabric.launch.garbage",
        "fabric.launch.parent_death",
        "fabric.launch.signals",
        "fabric.launch.stores",
    ],
    ["fabric.plugins.environments"],
    ["fabric.launch"],
    ["fabric.accelerators", "fabric.forward", "fabric.loggers", "fabric.precision"],
    ["fabric.collectives"],
    ["fabric.data"],
    ["fabric.wrappers"],
    ["fabric.checkpoint"],
    ["fabric.plugins"],
    [
        "fabric.batch_size",
        "fabric.checks",
        "fabric.guard",
        "fabric.metrics",
        "fabric.preemption",
        "fabric.profile",
        "fabric.progress",
        "fabric.replicas",
        "fabric.throughput",
    ],
    ["fabric.loss_check", "fabric.utilities.throughput", "fabric.watchdog"],
    ["fabric.strategies"],
    ["fabric.checkpoint.latest"],
    ["fabric.integrations"],
    ["fabric.connector", "fabric.resolve"],
    ["fabric.facts"],
    ["fabric.saving", "fabric.setup", "fabric.verbs"],
    ["fabric.fabric"],
    ["fabric.report"],
    ["fabric.testing", "fabric.tools"],
    ["fabric.cli"],
    ["fabric.__main__"],
]
LEVELS = {name: level for level, names in enumerate(ORDER) for name in names}
HEAVY = {
    "fsspec",
    "lightning_utilities",
    "numpy",
    "pandas",
    "scipy",
    "sklearn",
    "tensorboard",
    "torchmetrics",
}
MAX_MODULES = 60  # that `from fabric import Fabric` loads beyond torch, our own included
MAX_FILE, MAX_FUNCTION, MAX_MEDIAN = 450, 50, 10
FRONT_DESK = ("fabric.facts", "fabric.fabric", "fabric.saving", "fabric.setup", "fabric.verbs")
BACKENDS = ("ddp", "fsdp", "nccl", "gloo", "deepspeed", "horovod", "xla")


# the source


@cache
def sources() -> dict[str, ast.Module]:
    """Module name to syntax tree, for every file of the package. Packages have the name of their folder."""
    return {
        module_name(path): ast.parse(path.read_text(), str(path)) for path in sorted(PACKAGE.rglob("*.py"))
    }


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def packages() -> frozenset[str]:
    return frozenset(module_name(path) for path in PACKAGE.rglob("__init__.py"))


def modules() -> list[str]:
    return [name for name in sources() if name not in packages()]


@cache
def imports(name: str) -> list[tuple[str, str, int]]:
    """(imported module, name or "", line) for every import of this package, however deep it is nested."""
    return list(_imports(name))


def _imports(name: str) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(sources()[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names if in_fabric(alias.name))
        elif isinstance(node, ast.ImportFrom) and in_fabric(node.module or ""):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (
                    (whole, "", node.lineno) if whole in sources() else (node.module, alias.name, node.lineno)
                )
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            literals = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            yield from ((text, "", node.lineno) for text in literals if in_fabric(str(text)))


def in_fabric(name: str) -> bool:
    return name == "fabric" or name.startswith("fabric.")


def place(name: str) -> str | None:
    """The name in ORDER under which a module stands."""
    fitting = [known for known in LEVELS if name == known or name.startswith(known + ".")]
    return max(fitting, key=len, default=None)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.lineno} {node.name}", node


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Every string that stands alone as a statement: docstrings, also those below attributes."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {node.value for node in statements if isinstance(node.value, ast.Constant)}


# imports


def test_no_cycle():
    graph = {name: {imported for imported, _, _ in imports(name)} - {name} for name in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports\n  ".join(reversed(error.args[1])), pytrace=False)


def test_every_module_has_a_level():
    without = [name for name in modules() if place(name) is None]
    assert without == [], "no place in ORDER (DESIGN.md, Order of imports)"


def test_imports_go_downwards():
    wrong = []
    for name in modules():
        for imported, _, line in imports(name):
            here, there = place(name), place(imported)
            if here and there and here != there and LEVELS[there] >= LEVELS[here]:
                levels = f"(level {LEVELS[there]}) into level {LEVELS[here]}"
                wrong.append(f"{name}:{line}: {imported} {levels}")
    assert wrong == []


def test_names_come_from_the_module_that_defines_them():
    """Inside the package nobody uses a lazy table, and nobody takes a private name of another module."""
    every = [(f"{name}:{line}", *taken) for name in modules() for *taken, line in imports(name)]
    facade = [f"{where}: {imported}" for where, imported, _ in every if imported in packages()]
    private = [f"{where}: {taken}" for where, _, taken in every if is_private(taken)]
    assert (facade, private) == ([], [])


def test_lazy_names_are_for_users():
    """mypy takes any name from a module with a `__getattr__`: what we import must be defined there."""
    lazy = {name for name in modules() if "__getattr__" in defined(name)}
    taken = [(name, *one) for name in modules() for one in imports(name)]
    taken = [(name, home, what, line) for name, home, what, line in taken if home in lazy and what]
    assert len(taken) > 20
    wrong = [f"{name}:{line}: {home}.{what}" for name, home, what, line in taken if what not in defined(home)]
    assert wrong == []


@cache
def defined(name: str) -> frozenset[str]:
    """What a module defines or imports at its top level."""
    found: set[str] = set()
    for node in sources()[name].body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        else:
            stored = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
            found |= {part.id for part in stored if isinstance(part.ctx, ast.Store)}
    return frozenset(found)


def is_private(name: str) -> bool:
    # The names of the wrappers are part of the compatible surface, their underscore included.
    return name.startswith("_") and not name.startswith(("__", "_Fabric"))


def test_nobody_imports_integrations():
    others = [name for name in sources() if place(name) != "fabric.integrations"]
    every = [(name, imported) for name in others for imported, _, _ in imports(name)]
    assert [pair for pair in every if place(pair[1]) == "fabric.integrations"] == []


# Folders that can be deleted, each with the slices that it imports. The rest is the kernel.
_SHARDED = "fabric.checkpoint.formats.sharded"
NEEDS: dict[str, set[str]] = {
    "fabric.batch_size": set(),
    "fabric.checkpoint.background": set(),
    _SHARDED: set(),
    "fabric.checkpoint.formats.safetensors": set(),
    "fabric.checkpoint.latest": set(),
    "fabric.collectives.extra": set(),
    "fabric.data.iterable": set(),
    "fabric.guard": set(),
    "fabric.launch.functions": set(),
    "fabric.loggers": set(),
    "fabric.loss_check": {"fabric.replicas"},
    "fabric.metrics": set(),
    **{
        f"fabric.plugins.environments.{name}": set()
        for name in ("kubeflow", "lsf", "mpi", "slurm", "torchelastic")
    },
    "fabric.preemption": set(),
    "fabric.profile": set(),
    "fabric.progress": set(),
    "fabric.replicas": set(),
    "fabric.report": {"fabric.throughput"},
    "fabric.strategies.context_parallel": {"fabric.strategies.data_parallel", "fabric.strategies.sharding"},
    "fabric.strategies.data_parallel": set(),
    "fabric.strategies.deferred_init": {"fabric.strategies.sharding"},
    "fabric.strategies.fsdp": {
        "fabric.strategies.context_parallel",
        "fabric.strategies.deferred_init",
        "fabric.strategies.sharding",
    },
    "fabric.strategies.local_sgd": {"fabric.checkpoint.background"},
    "fabric.strategies.pipeline": {
        "fabric.strategies.data_parallel",
        "fabric.strategies.deferred_init",
        "fabric.strategies.sharding",
        "fabric.strategies.zero1",
    },
    "fabric.strategies.sharding": {"fabric.strategies.deferred_init"},
    "fabric.strategies.tensor_parallel": {"fabric.strategies.deferred_init", "fabric.strategies.sharding"},
    "fabric.strategies.zero1": set(),
    "fabric.testing": set(),
    "fabric.throughput": set(),
    "fabric.tools.doctor": set(),
    "fabric.tools.plan": set(),
    "fabric.tools.report": {"fabric.report"},
    "fabric.utilities.spike": set(),
    "fabric.watchdog": {"fabric.guard"},
}
# Paths of Lightning Fabric: modules of two lines, which import what they name.
PATHS = {
    "fabric.strategies.dp",
    "fabric.strategies.launchers.multiprocessing",
    "fabric.strategies.model_parallel",
    "fabric.utilities.throughput",
}
# What annotations of the kernel name under TYPE_CHECKING, so that users' type checkers know it.
TYPES = {
    "BatchSize",
    "ContextParallel",
    "Logger",
    "PendingSave",
    "Profile",
    "Progress",
    "Stopper",
}


def slice_of(name: str) -> str | None:
    """The slice that a module is part of; None: the kernel, or an integration."""
    return next((one for one in NEEDS if name == one or name.startswith(one + ".")), None)


def uses_of_slices() -> list[tuple[str, str, str, int]]:
    """(importing module, slice, name, line) for each import of a slice from outside of it."""
    every = [(name, *one) for name in modules() for one in imports(name)]
    found = [(name, slice_of(home), what, line) for name, home, what, line in every]
    return [(name, one, what, line) for name, one, what, line in found if one and one != slice_of(name)]


def test_the_kernel_imports_no_slice():
    kernel = [use for use in uses_of_slices() if slice_of(use[0]) is None and use[0] not in PATHS]
    wrong = [use for use in kernel if use[2] not in TYPES and place(use[0]) != "fabric.integrations"]
    assert wrong == [], "name it in SLICES of core/slices.py"
    assert {use[2] for use in kernel if use[2] in TYPES} == TYPES


def test_slices_import_what_they_need():
    found: dict[str, set[str]] = {one: set() for one in NEEDS}
    for name, one, _, _ in uses_of_slices():
        if (own := slice_of(name)) is not None:
            found[own].add(one)
    assert found == NEEDS


def needed_by(deleted: str) -> set[str]:
    """The slices that do not work without one, itself among them."""
    gone = {deleted}
    while more := {one for one, needs in NEEDS.items() if needs & gone} - gone:
        gone |= more
    return gone


KERNEL_LOOP = """
import os, sys, tempfile
# Of an editable install: it finds deleted folders.
sys.meta_path[:] = [one for one in sys.meta_path if "Editable" not in repr(one)]
from importlib import import_module
import torch
for name in MODULES if os.environ.get("RANK", "0") == "0" else []:
    import_module(name)
from torch.utils.data import DataLoader, TensorDataset
from fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = torch.nn.Linear(4, 2)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for (x,) in fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)):
    optimizer.zero_grad()
    fabric.backward(model(x).sum())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
state = {"model": model, "optimizer": optimizer}
path = fabric.broadcast(tempfile.mkdtemp()) + "/state.pt"
fabric.save(path, state)
fabric.load(path, state)
assert fabric.all_reduce({"a": torch.ones(2)}, reduce_op="sum")["a"].tolist() == [2.0, 2.0]
fabric.barrier()
assert PACKAGE in sys.modules["fabric"].__file__
fabric.print("done")
"""


LAUNCHES = tuple(
    [f"fabric.{name}" for name in ("guard", "launch", "plugins", "preemption", "report", "watchdog")]
)


@pytest.mark.slow
@pytest.mark.parametrize("one", NEEDS)
def test_the_kernel_works_without_a_slice(tmp_path, warm, one):
    """A copy without its folder: all modules import but those that need it, and a job of 2 ranks runs.

    Both ranks are forked from a warm process. Where the slice may matter to a launch, only the first one is.
    """
    shutil.copytree(PACKAGE, tmp_path / "fabric", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / one.replace(".", "/")
    shutil.rmtree(folder) if folder.is_dir() else folder.with_suffix(".py").unlink()
    gone = needed_by(one)
    kept = [name for name in modules() if slice_of(name) not in gone and name not in PATHS]
    kept = [name for name in kept if place(name) != "fabric.integrations" and "__main__" not in name]
    script = tmp_path / "train.py"
    script.write_text(KERNEL_LOOP.replace("MODULES", repr(kept)).replace("PACKAGE", repr(str(tmp_path))))
    run = warm.run if one.startswith(LAUNCHES) else partial(warm.torchrun, ranks=2)
    done = run(script, timeout=300, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_slice_that_was_deleted_is_named(monkeypatch):
    monkeypatch.setitem(slices.SLICES, "latest", "fabric.checkpoint.no_such_folder.latest")
    with pytest.raises(
        ConfigurationError, match="This needs fabric/checkpoint/no_such_folder/, which was del"
    ):
        slices.use_slice("latest")


VERSIONS = "fabric.core.torch_versions"  # what differs between versions of torch


def test_private_names_of_torch_live_in_torch_files():
    """A new torch that changes a private name fails a test of `_torch.py`, not a user's run."""
    found = {name: sorted(private_names_of_torch(tree)) for name, tree in sources().items()}
    inside = {name for name in found if name.endswith("._torch") or name == VERSIONS}
    assert {"_foreach_norm", "_utils"} <= {*found["fabric.strategies._torch"], *found["fabric.core._torch"]}
    outside = [f"{name}: {one}" for name in sorted(found.keys() - inside) for one in found[name]]
    assert outside == [], "move it into `_torch.py` of its folder, with a test"


def private_names_of_torch(tree: ast.Module) -> set[str]:
    """Return private names in imports of torch and in attribute chains that begin at torch, dist or nn."""
    parts: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            parts |= {part for alias in node.names if of_torch(alias.name) for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom) and of_torch(node.module or ""):
            parts |= {*node.module.split("."), *[alias.name for alias in node.names]}
        elif isinstance(node, ast.Attribute) and root_of(node) in ("torch", "dist", "nn"):
            parts.add(node.attr)
    return {part for part in parts if re.match(r"_(?!_)", part)}


def of_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def root_of(node: ast.expr) -> str | None:
    """Return the name at which a chain of attributes, calls and subscripts begins."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("name", sorted(packages()))
def test_packages_load_nothing_when_imported(name):
    """What a package re-exports loads on first use: importing one module of it must not load the others."""
    tree = sources()[name]
    at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    loaded = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in at_import}
    light = {"fabric.core.lazy"} | ({"fabric.core.torch_versions"} if name == "fabric" else set())
    assert {module for module in loaded if in_fabric(module)} <= light
    assert "torch" not in loaded


def test_tests_lie_in_folders_of_the_package():
    """`tests/FOLDER` has the tests of `fabric/FOLDER`; these kinds of tests have folders of their own."""
    kinds = {"end_to_end", "engines", "fuzz", "gpu", "guide", "pretend", "security"}
    found = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    assert {name for name in found - kinds if not (PACKAGE / name).is_dir()} == set()


def test_test_files_have_names_of_their_own():
    """Ranks import tests by the names of their files."""
    apart = ("integrations", "pretend")  # run by themselves
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parts[-2] not in apart]
    files = [path for path in files if not {*apart} & {*path.parts}]
    names = [path.name for path in files]
    assert {name for name in names if names.count(name) > 1} == set()


# sizes


def test_files_are_short():
    lines = {module_name(path): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > MAX_FILE} == {}


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_functions_are_short():
    lines = {where: body_lines(node) for where, node in functions()}
    assert {where: count for where, count in lines.items() if count > MAX_FUNCTION} == {}
    assert median(lines.values()) < MAX_MEDIAN


# habits


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PACKAGE.rglob("*.md")]
    pages += [ROOT / folder / "README.md" for folder in ("examples", "benchmarks", "tests/pretend")]
    found = [(page, link) for page in pages for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text())]
    assert len(found) > len(pages)
    assert [f"{page}: {link}" for page, link in found if not (page.parent / link).exists()] == []
    assert (ROOT / "README.md").stat().st_size <= 10_000, "the README is one page: move it to a folder's"
    assert (ROOT / "CONTRIBUTING.md").stat().st_size <= 12_000, "one page, too"


def test_no_assert_stands_for_an_error():
    found = [
        f"{name}:{node.lineno}"
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert found == [], "raise an error of core.errors: an assert has no remedy, and vanishes under python -O"


def identifiers_and_strings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    documentation = docstrings(tree)
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module", "asname"):
            text = getattr(node, field, None)
            if isinstance(text, str):
                yield text, getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            yield node.value, node.lineno


@pytest.mark.parametrize("name", [name for name in FRONT_DESK if name in sources()])
def test_the_front_desk_names_no_backend(name):
    found = [
        f"line {line}: {text!r}"
        for text, line in identifiers_and_strings(sources()[name])
        if any(backend in text.lower() for backend in BACKENDS)
    ]
    assert found == []


@pytest.mark.parametrize("name", [name for name in FRONT_DESK if name in sources()])
def test_the_front_desk_asks_for_no_strategy_class(name):
    calls = [node for node in ast.walk(sources()[name]) if isinstance(node, ast.Call) and len(node.args) == 2]
    checks = [node for node in calls if ast.unparse(node.func) in ("isinstance", "issubclass")]
    asked = [ast.unparse(node) for node in checks if "Strategy" in ast.unparse(node.args[1])]
    assert asked == [], "read strategy.traits, or call a method"


def test_no_two_classes_have_one_name():
    """`grep NAME` finds one thing."""
    homes: dict[str, list[str]] = {}
    for name, tree in sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


# what importing does


def fresh(code: str) -> dict:
    """What `code` puts into `result`, in a new interpreter."""
    code = f"import json, sys\nresult = {{}}\n{code}\nprint(json.dumps(result))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_import_fabric_loads_no_torch():
    loaded = fresh("import fabric\nresult['modules'] = sorted(sys.modules)")["modules"]
    assert [name for name in loaded if name.partition(".")[0] in ("torch", "numpy")] == []


def test_fabric_costs_few_modules_beyond_torch():
    added = fresh(
        "import torch\n"
        "before = set(sys.modules)\n"
        "from fabric import Fabric\n"
        "result['modules'] = sorted(set(sys.modules) - before)"
    )["modules"]
    assert HEAVY & {name.partition(".")[0] for name in added} == set()
    assert len(added) < MAX_MODULES, added


SIDE_EFFECTS = """
import importlib, os, signal, threading, warnings
import torch, torch.distributed

def facts():
    return {
        "environ": dict(os.environ),
        "signals": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "threads": threading.active_count(),
        "filters": [str(filter) for filter in warnings.filters],
        "dtype": str(torch.get_default_dtype()),
        "num_threads": torch.get_num_threads(),
        "group": torch.distributed.is_initialized(),
        "path": sys.path[:],
        "hooks": [str(sys.excepthook), str(sys.meta_path)],
        "patches": [str(getattr(owner, name)) for owner, name in (
            (torch, "compile"), (torch, "load"), (torch, "save"), (torch.nn.Module, "__call__"),
            (torch.Tensor, "backward"), (torch.utils.data.DataLoader, "__init__"),
        )],
    }

for module in THIRD_PARTY:
    importlib.import_module(module)
before = facts()
for module in MODULES:
    importlib.import_module(module)
after = facts()
result["changed"] = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
"""


def test_importing_has_no_side_effects():
    names = [name for name in sources() if place(name) != "fabric.integrations" and "__main__" not in name]
    third_party = sorted(third_party_imports(names))
    code = SIDE_EFFECTS.replace("THIRD_PARTY", repr(third_party)).replace("MODULES", repr(names))
    assert fresh(code)["changed"] == {}


def third_party_imports(names: list[str]) -> set[str]:
    """What these modules import at their top level from elsewhere: torch's own side effects are not ours."""
    found = set()
    for name in names:
        for node in sources()[name].body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return {name for name in found if not in_fabric(name)}
