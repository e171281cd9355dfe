"""Ranks as Ray actors."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.integrations.ray.environment import RayEnvironment as RayEnvironment

__getattr__, __dir__ = lazy_exports(__name__, {"RayEnvironment": "fabric.integrations.ray.environment"})
