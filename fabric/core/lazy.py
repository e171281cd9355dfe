"""Lazy names of packages and modules (PEP 562). Imports no torch.

An `__init__` lists each export twice: for type checkers (`import X as X`), and with the module that defines
it. `core/lightning_names.py` lists names that only Lightning Fabric has in a module of the same path.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PACKAGES = (
    *("strategies", "loggers", "accelerators", "plugins", "plugins.environments", "plugins.collectives"),
    *("utilities", "testing", "core.errors"),
)
"""Packages with public names, in the order in which a name is searched for an error. None imports torch."""


def lazy_exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package with lazy public names; set its `__all__`.

    Args:
        package: The package's `__name__`.
        homes: Each public name with the module that defines it.
    """
    vars(sys.modules[package])["__all__"] = list(homes)
    return lazy_names(package, homes), lambda: sorted(homes)


def _exporting_package(module: str, name: str) -> str | None:
    """Return the public package that exports a `name` that `module` lacks; None: there is none."""
    if name.startswith("_") or find_spec(f"{module}.{name}") is not None:  # a submodule
        return None
    for package in _PACKAGES:
        try:
            found = import_module(f"fabric.{package}")
        except ModuleNotFoundError:  # a slice that was deleted
            continue
        if name in getattr(found, "__all__", vars(found)):
            return found.__name__
    return None


def lazy_names(module: str, homes: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return `__getattr__` of a module: names of `homes` and of Lightning Fabric load on first use.

    Args:
        module: The module's `__name__`.
        homes: Names with the module that defines each.
    """

    def load(name: str) -> Any:
        home = (homes or {}).get(name)
        # The import system looks up dunders of every module, and submodules of packages.
        if home is None and not name.startswith("__") and not (homes and name[0].islower()):
            from fabric.core.lightning_names import find_home

            home = find_home(module.removeprefix("fabric."), name)
        if home is None and (package := _exporting_package(module, name)) is not None:
            # Not an AttributeError, whose text `from fabric import NAME` would drop.
            raise ImportError(
                f"cannot import name {name!r} from {module!r}. Write: from {package} import {name}"
            )
        if home is None:
            offers = f"; it offers {', '.join(sorted(homes))}" if homes else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{offers}")
        value = getattr(import_module(home), name)
        setattr(sys.modules[module], name, value)  # the next access does not call this function
        return value

    return load
