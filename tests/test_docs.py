"""`python -m pydoc fabric.NAME` shows every public name: it is found, and says what it gives. Docstrings are
compared with signatures and bodies: what they name is there, and what is there is named.
"""

import ast
import builtins
import inspect
import pkgutil
import pydoc
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
from test_public_api import PUBLIC as BY_MODULE
from torch.distributed import distributed_c10d

import fabric
from fabric.core import errors
from fabric.strategies.strategy import Strategy

PACKAGES = [name for _, name, is_package in pkgutil.walk_packages(fabric.__path__, "fabric.") if is_package]
PUBLIC = [
    f"{package}.{name}"
    for package in ["fabric", *PACKAGES]
    for name in getattr(import_module(package), "__all__", [])
]


def undocumented(found: object) -> list[str]:
    """What of a class, or of a function, is ours and says nothing."""
    if not inspect.isclass(found):
        return [] if found.__doc__ else ["itself"]
    silent = [] if vars(found).get("__doc__") else ["itself"]
    for name, value in inspect.getmembers(
        found, lambda value: inspect.isroutine(value) or isinstance(value, property)
    ):
        owner = next((kind for kind in found.__mro__ if name in vars(kind)), object)
        ours = owner.__module__.startswith("fabric.") and not name.startswith("_")
        silent += [name] * (ours and not inspect.getdoc(value))
    return silent


@pytest.mark.parametrize("name", PUBLIC)
def test_pydoc_finds_it_documented(name):
    found = pydoc.locate(name)
    assert found is not None
    assert undocumented(found) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fabric.Fabric.all_gather", ["(world_size, *shape)", "CollectiveMismatch", "All ranks"]),
        ("fabric.Fabric.setup", ["(model, *optimizers)", "ConfigurationError"]),
        ("fabric.utilities.Throughput", ["FLOP/s", "samples_per_sec"]),
        ("fabric.seed_everything", ["seed_everything("]),
    ],
)
def test_what_pydoc_prints(name, words):
    page = pydoc.plain(pydoc.render_doc(name))
    for word in words:
        assert word in page


def test_a_package_lists_its_lazy_names():
    page = pydoc.plain(pydoc.render_doc("fabric.strategies"))
    assert "class DDPStrategy(" in page
    assert "class FSDPStrategy(" in page


# what docstrings say, and what signatures and bodies do

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
LISTED = [
    name for page in REFERENCE.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
]
RETURNED = [  # by verbs, and under public names
    *("fabric.collectives.handle.Handle", "fabric.checkpoint.background.pending.PendingSave"),
    *("fabric.profile.profile.Profile", "fabric.progress.progress.Progress"),
    *("fabric.core.registry.Registry", "fabric.tools.plan.plan.MemoryPlan"),
    *("fabric.testing.communication.Communication", "fabric.batch_size.search.BatchSize"),
]
COMPATIBLE = [
    f"{module}.{name}" for module, text in BY_MODULE.items() for name in re.findall(r"^\w+", text, re.M)
]
ERRORS = {name for name, kind in vars(errors).items() if inspect.isclass(kind)}
SENDING = {
    name
    for name, call in vars(distributed_c10d).items()
    if type(call) is FunctionType
    and name[0] != "_"
    and ("async_op" in inspect.signature(call).parameters or re.search(r"^(?!send|recv).*_object", name))
}
ALL_MUST = re.compile(r"ll ranks\b[^.]* must |no other rank")
EACH_CALL = re.compile(r"must( all)? make each call")  # what a class says of its methods
ELSEWHERE = re.compile(r"[Aa]rguments\b[^.]*\b(as for|those of) ")
UNITS = {"timeout|second|interval|delay|margin": "econd", "byte|memory": "byte"}


class Call(NamedTuple):
    """A function, constructor, method or property of ours."""

    name: str
    function: Any
    doc: str
    beside: str
    """What else explains it: its class, and what it overrides."""

    @property
    def said(self) -> str:
        """All of it, in one line."""
        return one_line(f"{self.doc} {self.beside}")

    def entries(self, section: str) -> set[str]:
        """The names that `Args:` or `Raises:` explains."""
        found = re.search(rf"^{section}:\n((?:    .*\n|\n)+)", self.doc + "\n", re.M)
        heads = re.findall(r"^    (\S[^:]*):", found[1], re.M) if found else []
        return {name.strip(" *") for head in heads for name in head.split(",")}

    def parameters(self) -> list[inspect.Parameter]:
        named = [p for p in inspect.signature(self.function).parameters.values() if p.name[0] != "_"]
        return [p for p in named if p.name not in ("self", "cls")]


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


@cache
def body(function: Any) -> list[ast.AST]:
    """What a function's own lines do, without functions inside it."""
    if not function.__code__.co_filename.startswith(fabric.__path__[0]):  # typing's, a dataclass's
        return []
    todo: list[ast.AST] = [*ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body]
    done = []
    while todo:
        done.append(todo.pop())
        if not isinstance(done[-1], ast.FunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(done[-1])
    return done


def called(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.Call]]:
    for node in nodes:
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node


@cache
def calls() -> list[Call]:
    """Everything that can be called on the public surface, and what is ours in the bases of its classes."""
    found = {
        id(one): (name, one)
        for name in (*PUBLIC, *COMPATIBLE, *LISTED, *RETURNED)
        if callable(one := pydoc.locate(name))
    }
    there: list[Call] = []
    kinds: dict[type, str] = {}
    for name, one in found.values():
        if inspect.isclass(one):
            kinds |= {kind: name for kind in one.__mro__ if kind.__module__.startswith("fabric.")}
        elif inspect.isfunction(one):
            there.append(Call(name, inspect.unwrap(one), inspect.getdoc(one) or "", ""))
    for kind, name in kinds.items():
        about = kind.__doc__ or ""
        there.append(
            Call(f"{name} ({kind.__name__})", vars(kind).get("__init__"), inspect.cleandoc(about), "")
        )
        for key, value in vars(kind).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if key[0] != "_" and isinstance(function, FunctionType):
                bases = [base for base in kind.__mro__[1:] if key in vars(base)]
                beside = [about, *[f"{vars(base)[key].__doc__} {base.__doc__}" for base in bases]]
                doc = inspect.getdoc(function) or ""
                there.append(Call(f"{kind.__name__}.{key}", inspect.unwrap(function), doc, " ".join(beside)))
    return [call for call in there if isinstance(call.function, FunctionType)]


def arguments_not_there(call: Call) -> set[str]:
    return call.entries("Args") - {p.name for p in call.parameters()}


def arguments_without_a_word(call: Call) -> set[str]:
    """Parameters neither in `Args:` nor in backticks, unless the text names another docstring for them."""
    doc = one_line(call.doc)
    if call.function.__module__ == "typing" or ELSEWHERE.search(doc):  # `__init__` of protocols
        return set()
    quoted = {name for code in re.findall(r"`([^`]*)`", doc) for name in re.findall(r"\w+", code)}
    return {p.name for p in call.parameters()} - call.entries("Args") - quoted


def numbers_without_a_unit(call: Call) -> set[str]:
    numbers = [p.name for p in call.parameters() if re.search(r"\b(int|float)\b", str(p.annotation))]
    return {
        f"{name}: {unit}"
        for name in numbers
        for pattern, unit in UNITS.items()
        if re.search(pattern, name) and not (unit in call.said or ELSEWHERE.search(call.said))
    }


def errors_without_a_word(call: Call) -> set[str]:
    nodes = body(call.function)
    raised = [node.exc for node in nodes if isinstance(node, ast.Raise) and node.exc is not None]
    raised += [part for name, node in called(nodes) if name == "abort_call" for part in ast.walk(node)]
    return {name for name, _ in called(raised) if name in ERRORS} - call.entries("Raises")


def errors_not_there(call: Call) -> set[str]:
    ours = {name.rpartition(".")[2] for name in PUBLIC}
    known = ERRORS | ours | vars(builtins).keys() | call.function.__globals__.keys()
    return call.entries("Raises") - known


def collectives_that_do_not_say_so(call: Call) -> set[str]:
    verbs = {name for name in dir(Strategy) if ALL_MUST.search(one_line(getattr(Strategy, name).__doc__))}
    made = [(name, ast.unparse(node.func)) for name, node in called(body(call.function))]
    sends = {name for name, whole in made if re.search(r"(strategy|self)\.\w+$", whole)} & verbs
    sends |= {call.name.rpartition(".")[2], *[name for name, _ in made]} & SENDING
    says = ALL_MUST.search(one_line(call.doc)) or EACH_CALL.search(call.said)
    return set() if says else sends


@pytest.mark.parametrize(
    "rule",
    [
        arguments_not_there,
        arguments_without_a_word,
        numbers_without_a_unit,
        errors_without_a_word,
        errors_not_there,
        collectives_that_do_not_say_so,
    ],
)
def test_docstrings_and_code_agree(rule: Callable[[Call], set[str]]):
    assert {call.name: wrong for call in calls() if (wrong := rule(call))} == {}


@pytest.mark.parametrize("name", [name for name in dir(fabric.Fabric) if name[0] != "_"])
def test_each_method_of_fabric_says_which_ranks_must_call_it(name):
    method = inspect.getattr_static(fabric.Fabric, name)
    if not isinstance(method, property):
        doc = one_line(inspect.getdoc(method))
        assert ALL_MUST.search(doc) or "No rank waits" in doc
