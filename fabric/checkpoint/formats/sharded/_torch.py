"""Private names of `torch.distributed.checkpoint`; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from typing import Any


def place_in_file(name: str, offset: int, length: int) -> Any:
    """Return the record by which `torch.distributed.checkpoint` finds a value in its files."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)
