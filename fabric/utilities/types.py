"""The path under which migrated code imports protocols and aliases. Defines nothing itself."""

from fabric.core.types import Optimizable, ReduceOp, Stateful, Steppable

__all__ = ["Optimizable", "ReduceOp", "Stateful", "Steppable"]
