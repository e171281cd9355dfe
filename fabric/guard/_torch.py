"""Private names of process groups; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

import pickle
from typing import Any

import torch


def group_names() -> list[str]:
    """Return torch's names of the process groups of this process."""
    return [*torch.distributed.distributed_c10d._world.pg_names.values()]


def group_timeout(group: Any, device_type: str) -> Any:
    """Return the timeout of a group's collectives, or None if it has no backend for the device."""
    try:
        return group._get_backend(torch.device(device_type)).options._timeout
    except (RuntimeError, AttributeError):
        return None


def flight_record() -> list[dict[str, Any]]:
    """Return torch's record of the collectives of this process; empty in a torch without it."""
    try:
        from torch._C import _distributed_c10d

        return pickle.loads(_distributed_c10d._dump_fr_trace(True, False, False)).get("entries", [])  # type: ignore[attr-defined, no-any-return]
    except (ImportError, AttributeError, RuntimeError):
        return []
