"""The package itself, or how it is installed."""

from __future__ import annotations

import os
from typing import Any

from fabric.integrations.needed import needed


def load_deepspeed(device_type: str | None = None) -> Any:
    """`deepspeed`, which compiles nothing by itself.

    Args:
        device_type: That of this process, where it is known: "cpu" has to be said before the import.

    Raises:
        MissingExtraError: DeepSpeed is not installed, or does not load.
    """
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    instead = 'write strategy="zero1", "zero2" or "fsdp", which need nothing else'
    deepspeed = needed("deepspeed", 'strategy="deepspeed"', "deepspeed", least="0.19", instead=instead)
    from deepspeed.ops import __compatible_ops__

    # Its collectives in shared memory, which it would compile (for minutes) as soon as ranks meet.
    __compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
