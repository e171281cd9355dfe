"""Import of the package deepspeed."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fabric.core.extras import import_package

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Context that sets environment variables that are unset; it removes all that were added inside."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if name not in before})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def load_deepspeed(device_type: str | None = None) -> Any:
    """Import and return `deepspeed`, configured not to compile its operators.

    Args:
        device_type: Device type of this process, or None: "cpu" must be set before the import.

    Raises:
        MissingExtraError: DeepSpeed is not installed, or does not load.
    """
    instead = 'write strategy="zero1", "zero2" or "fsdp", which need nothing else'
    asked = 'strategy="deepspeed"'
    with environment(**({"DS_ACCELERATOR": "cpu"} if device_type == "cpu" else {})):
        deepspeed = import_package("deepspeed", asked, "deepspeed", least="0.19", instead=instead)
    from deepspeed.ops import __compatible_ops__

    # Its shared-memory collectives, which take minutes to compile at the first use of a group.
    __compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def forget_groups() -> None:
    """Make DeepSpeed create new process groups: those of an earlier launch in this process are destroyed."""
    from deepspeed.utils import groups

    groups._release_process_group_references()
