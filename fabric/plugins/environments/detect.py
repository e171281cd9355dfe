"""Which environment this process is in: one order of precedence, one variable that overrules it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError
from fabric.core.registry import unknown_name_message
from fabric.plugins.environments.registry import ENVIRONMENT_REGISTRY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabric.plugins.environments.cluster_environment import ClusterEnvironment

PRECEDENCE = (
    "process_group",  # what exists beats what variables promise
    "torchelastic",  # torchrun inside sbatch: the inner launcher started these processes
    "local",
)
"""Registered names; the first whose `detect()` says yes."""


def detect_environment(
    candidates: Sequence[type[ClusterEnvironment]] | None = None, forced: str | None = None
) -> ClusterEnvironment:
    """A new environment object: the forced one, else the first candidate that recognises this process.

    Args:
        candidates: Classes in order of precedence, the last of which should always say yes; None: ours.
        forced: A registered name; defaults to the variable FABRIC_ENVIRONMENT.

    Raises:
        ConfigurationError: The forced name is not registered.
    """
    name = forced or os.environ.get("FABRIC_ENVIRONMENT")
    if name:
        if name not in ENVIRONMENT_REGISTRY:
            raise ConfigurationError(
                unknown_name_message("FABRIC_ENVIRONMENT", name, ENVIRONMENT_REGISTRY.names())
            )
        made: Any = ENVIRONMENT_REGISTRY.get(name)
        return made  # type: ignore[no-any-return]
    kinds: Any = candidates or [ENVIRONMENT_REGISTRY.entry(name).load() for name in PRECEDENCE]
    found: ClusterEnvironment = next(kind for kind in kinds if kind.detect())()
    return found
