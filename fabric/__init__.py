"""The public face of `fabric`. Lazy: `import fabric` loads neither torch nor the package behind the names."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric.fabric import Fabric
    from fabric.utilities.seed import seed_everything
    from fabric.wrappers import is_wrapped

__version__ = "0.1.0"

__all__ = ["Fabric", "__version__", "is_wrapped", "seed_everything"]

_HOMES = {
    "Fabric": "fabric.fabric",
    "is_wrapped": "fabric.wrappers",
    "seed_everything": "fabric.utilities.seed",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fabric' has no attribute {name!r}; it offers {', '.join(__all__)}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
