"""Copies of checkpoint data in host memory, bytes of tensors, and keys of tensors that share memory."""

from __future__ import annotations

from typing import Any

import torch

from fabric.checkpoint.portable import LazyTensor
from fabric.core._torch import memory_of
from fabric.core.tree import map_tree
from fabric.precision.dtypes import as_bytes


class Snapshot:
    """Checkpoint data copied to host memory; tensors that share memory share it in the copy.

    Tensors on an accelerator are copied to pinned memory; the host waits once, at the end.

    Args:
        before: A snapshot that is no longer used. Its memory is reused: fresh pages are slow.
    """

    def __init__(self, before: Snapshot | None) -> None:
        self._copies: dict[Any, torch.UntypedStorage] = {}  # by address and size of the source
        self._free = [] if before is None else list(before._copies.values())
        self._devices: set[torch.device] = set()

    def of(self, tree: Any) -> Any:
        """Return a copy of a result of `state.gather`. Called once."""
        copy = map_tree(self._copied, tree)
        self._free.clear()
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        return copy

    def _copied(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._tensor(leaf)
        return bytearray(leaf) if type(leaf) is bytearray else leaf

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        lazy = tensor.is_conj() or tensor.is_neg()  # its memory has other values
        if lazy or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._copies:
            pinned = storage.device.type not in ("cpu", "mps")  # mps: torch has no pinned memory of it
            if pinned:
                self._devices.add(storage.device)
            self._copies[key] = self._memory(storage.nbytes(), pinned).copy_(storage, pinned)
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(self._copies[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, tensor.requires_grad)
        copy.__dict__.update(vars(tensor))
        return copy.requires_grad_(tensor.requires_grad)

    def _memory(self, size: int, pinned: bool) -> torch.UntypedStorage:
        # Reused in the order of the last snapshot: the first one fits, unless the state has changed.
        if self._free and self._free[0].nbytes() == size:
            return self._free.pop(0)
        self._free.clear()
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned).untyped_storage()


def values(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's values in row-major order, as a view if possible."""
    flat: Any = as_bytes(tensor.cpu()).numpy()
    return memoryview(flat)


def storage_key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for two names of one tensor, and differs between tensors."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not local.numel() or isinstance(tensor, LazyTensor):
        return id(tensor)
    view = local.storage_offset(), local.stride(), local.is_conj(), local.is_neg()
    return memory_of(tensor), view, tensor.shape, tensor.dtype, getattr(tensor, "placements", None)
