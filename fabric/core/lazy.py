"""Lazy names for a package's `__init__` (PEP 562), called once per import of a package. Imports no torch.

An `__init__` names each export twice: for type checkers (`import X as X`), and in the table of its home.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose public names load on first use. Sets its `__all__`.

    Args:
        package: The package's `__name__`.
        homes: Each public name with the module that defines it.
    """
    vars(sys.modules[package])["__all__"] = list(homes)

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it offers {', '.join(sorted(homes))}"
            )
        value = getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)  # the next access finds it without this function
        return value

    def names() -> list[str]:
        return sorted(homes)

    return load, names
