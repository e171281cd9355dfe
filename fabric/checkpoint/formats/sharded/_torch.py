"""Private names of `torch.distributed.checkpoint`; `core/test_torch_internals.py` tests each."""

from __future__ import annotations

from typing import Any


def place_in_file(name: str, offset: int, length: int) -> Any:
    """Return the record by which `torch.distributed.checkpoint` finds a value in its files."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)


def layout_of(name: str) -> Any:
    """Return the `torch.layout` of this name, as a description refers to it."""
    from torch.serialization import _get_layout

    return _get_layout(name)


def memory_format_of(value: int) -> Any:
    """Return the member of torch's enumeration of memory formats with this value."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING(value)


def chunk_of(tensor: Any) -> Any:
    """Return offsets and sizes (`ChunkStorageMetadata`) of this rank's shard of a DTensor.

    Raises:
        ValueError: A placement is partial.
    """
    (chunk,) = tensor.__create_chunk_list__()
    return chunk
