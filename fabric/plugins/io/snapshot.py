"""Copies of checkpoint data in host memory, which a loop may not change any more."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fabric.utilities.state_keys import like


class Snapshot:
    """Checkpoint data copied to host memory; tensors that share memory share it in the copy.

    Args:
        before: One whose memory is taken again, unless somebody still holds a tensor of it (a CheckpointIO
            that writes later). Fresh pages cost more than the copying.
    """

    def __init__(self, before: Snapshot | None) -> None:
        self._copies: dict[int, torch.UntypedStorage] = {}  # by the address of what they are of
        self._held: list[Any] = []  # weak references to the tensors
        held = before is None or any([tensor() is not None for tensor in before._held])
        self._free = [] if before is None or held else list(before._copies.values())

    def of(self, tree: Any) -> Any:
        """A copy of what `state.gather` gives. Called once."""
        copy = self._copied(tree)
        self._free.clear()
        return copy

    def _copied(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            made = self._tensor(tree)
            self._held.append(weakref.ref(made))
            return made
        if isinstance(tree, dict):
            return like(tree, {key: self._copied(value) for key, value in tree.items()})
        if type(tree) in (list, tuple):
            return type(tree)([self._copied(value) for value in tree])
        return bytearray(tree) if type(tree) is bytearray else tree

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            return tensor.detach().cpu() if tensor.device.type != "cpu" else tensor.detach().clone()
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._copies:
            self._copies[key] = self._memory(storage.nbytes()).copy_(storage)
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(self._copies[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)

    def _memory(self, size: int) -> torch.UntypedStorage:
        # In the order of the last time: the first one fits, unless the state has changed its shape.
        if self._free and self._free[0].nbytes() == size:
            return self._free.pop(0)
        self._free.clear()
        return torch.UntypedStorage(size)
