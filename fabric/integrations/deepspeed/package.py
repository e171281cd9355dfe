"""The package itself, or how it is installed."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fabric.core.extras import import_package

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Context with these variables in the environment, where they are not; what is added in it goes again."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in variables.items() if name not in before})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]


def load_deepspeed(device_type: str | None = None) -> Any:
    """`deepspeed`, which compiles nothing by itself.

    Args:
        device_type: That of this process, where it is known: "cpu" has to be said before the import.

    Raises:
        MissingExtraError: DeepSpeed is not installed, or does not load.
    """
    instead = 'write strategy="zero1", "zero2" or "fsdp", which need nothing else'
    asked = 'strategy="deepspeed"'
    with environment(**({"DS_ACCELERATOR": "cpu"} if device_type == "cpu" else {})):
        deepspeed = import_package("deepspeed", asked, "deepspeed", least="0.19", instead=instead)
    from deepspeed.ops import __compatible_ops__

    # Its collectives in shared memory, which it would compile (for minutes) as soon as ranks meet.
    __compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def forget_groups() -> None:
    """Let DeepSpeed make its process groups anew: those of another launch in this process are gone."""
    from deepspeed.utils import groups

    groups._release_process_group_references()
