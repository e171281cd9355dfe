"""The path under which migrated code imports protocols and aliases. Defines nothing itself."""

from fabric.core.lazy import lazy_names
from fabric.core.types import Optimizable, ReduceOp, Stateful, Steppable

__getattr__ = lazy_names(__name__)

__all__ = ["Optimizable", "ReduceOp", "Stateful", "Steppable"]
