"""`python -m pydoc fabric.NAME` shows every public name: it is found, and says what it gives."""

import inspect
import pkgutil
import pydoc
from importlib import import_module

import pytest

import fabric

OPTIONAL = "fabric.integrations."  # their packages need not be there
PACKAGES = [name for _, name, is_package in pkgutil.walk_packages(fabric.__path__, "fabric.") if is_package]
PUBLIC = [
    f"{package}.{name}"
    for package in ["fabric", *PACKAGES]
    if not package.startswith(OPTIONAL)
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
