"""Module path of Lightning Fabric for protocols and type aliases, which `core/types.py` defines."""

from fabric.core.lazy import lazy_names
from fabric.core.types import Optimizable, ReduceOp, Stateful, Steppable

__getattr__ = lazy_names(__name__)

__all__ = ["Optimizable", "ReduceOp", "Stateful", "Steppable"]
