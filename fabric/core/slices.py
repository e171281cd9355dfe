"""Slices: optional capabilities in folders that can be deleted.

This table and registries name their modules.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fabric.core.errors import ConfigurationError

SLICES = {
    "agreement": "fabric.collectives.extra.agreement",
    "background": "fabric.checkpoint.background.pending",
    "batch size": "fabric.batch_size.search",
    "call check": "fabric.guard.call_checker",
    "check": "fabric.testing.check",
    "check arguments": "fabric.testing.arguments",
    "consolidate arguments": "fabric.checkpoint.formats.sharded.command",
    "doctor": "fabric.tools.doctor.command",
    "doctor arguments": "fabric.tools.doctor.arguments",
    "extra": "fabric.collectives.extra.route",
    "functions": "fabric.launch.functions.multiprocess",
    "gradients": "fabric.collectives.extra.grads",
    "iterable": "fabric.data.iterable.iterables",
    "latest": "fabric.checkpoint.latest.latest",
    "logged numbers": "fabric.collectives.extra.scalars",
    "loss check": "fabric.loss_check.check",
    "metrics": "fabric.metrics.sync",
    "plan": "fabric.tools.plan.command",
    "plan arguments": "fabric.tools.plan.arguments",
    "preemption": "fabric.preemption.stopping",
    "profile": "fabric.profile.profile",
    "progress": "fabric.progress.progress",
    "rank zero first": "fabric.collectives.extra.rank_zero_first",
    "replicas": "fabric.replicas.check",
    "report": "fabric.report.part",
    "report arguments": "fabric.tools.report.arguments",
    "report command": "fabric.tools.report.command",
    "slurm": "fabric.plugins.environments.slurm",
    "streams": "fabric.data.iterable.stream_source",
    "watchdog": "fabric.watchdog.watchdog",
}
"""Slice names to the modules that other folders call."""

PARTS = ("watchdog", "replicas", "loss check")
"""Slices with a `make_part(strategy)`: the parts that a strategy of several ranks has at launch, in order."""


def find_slice(name: str) -> Any | None:
    """Return the module of a slice; None if its folder, or one that it needs, was deleted."""
    return _find_module(SLICES[name])


def _find_module(path: str) -> Any | None:
    if (module := sys.modules.get(path)) is not None:
        return module
    try:
        return import_module(path) if _exists(path) else None
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "fabric":
            raise
        return None


@cache
def _exists(path: str) -> bool:
    """Whether a module exists; cached, because every verb looks for the call check."""
    try:
        return find_spec(path) is not None
    except ModuleNotFoundError:  # its package was deleted, too
        return False


def use_slice(name: str) -> Any:
    """Return the module of a slice. Raises as `use_module`."""
    return use_module(SLICES[name])


def use_module(path: str) -> Any:
    """Return the module of a slice by its path.

    Raises:
        ConfigurationError: Its folder was deleted.
    """
    module = _find_module(path)
    if module is None:
        folder = path.rpartition(".")[0].replace(".", "/")
        raise ConfigurationError(
            f"This needs {folder}/, which was deleted from this copy of the package. Install "
            "torch-fabric anew, or leave the call out."
        )
    return module
