"""Tensors as `torch.save` writes them, without a ZIP archive made for each: for files of many tensors."""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

import torch

from fabric.core.torch_internals import memory_of
from fabric.plugins.io.portable import Stored
from fabric.utilities.dtypes import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

_LARGE = 16 << 20
"""Bytes of a tensor from which on torch itself writes it, for which the time does not count."""


def write_archive(tensor: Tensor, stream: Any) -> None:
    """Write what `torch.save` writes of the contiguous tensor, in host memory.

    Called under `torch.serialization.set_crc32_options(False)`: checksums would differ with the values.
    """
    if tensor.numel() * tensor.dtype.itemsize > _LARGE:
        torch.save(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous(), stream)
        return
    head, tail = _around(tensor.dtype, tensor.shape)
    stream.write(head)
    stream.write(values(tensor))
    stream.write(tail)


def values(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values in their order; of a copy, unless it lies so in host memory."""
    flat: Any = as_bytes(tensor.cpu()).numpy()
    return memoryview(flat)


def place_of(tensor: Tensor) -> Any:
    """What two names of one tensor have in common, and of two tensors differs."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not local.numel() or isinstance(tensor, Stored):
        return id(tensor)
    view = local.storage_offset(), local.stride(), local.is_conj(), local.is_neg()
    return memory_of(tensor), view, tensor.shape, tensor.dtype, getattr(tensor, "placements", None)


@lru_cache(256)
def _around(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """What stands before and after the values: the same for all tensors of one dtype and shape."""
    made = BytesIO()
    torch.save(torch.empty(shape, dtype=dtype), made)
    with ZipFile(made) as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    held = made.getbuffer()
    # Source: the ZIP format (APPNOTE 4.3.7): 30 bytes, the lengths of name and padding in the last four.
    start = entry.header_offset + 30
    start += sum([int.from_bytes(held[start - n : start - n + 2], "little") for n in (4, 2)])
    return bytes(held[:start]), bytes(held[start + entry.file_size :])
