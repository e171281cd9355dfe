"""Copies of checkpoint data in host memory, which a loop may not change any more."""

from __future__ import annotations

from typing import Any

import torch

from fabric.utilities.state_keys import like


def snapshot(tree: Any, copies: dict[int, Any] | None = None) -> Any:
    """A copy of checkpoint data in host memory; tensors that share memory share it in the copy.

    Args:
        tree: What `state.gather` gives.
        copies: Of storages, by address, in this tree.
    """
    copies = {} if copies is None else copies
    if isinstance(tree, torch.Tensor):
        return _copied(tree, copies)
    if isinstance(tree, dict):
        return like(tree, {key: snapshot(value, copies) for key, value in tree.items()})
    if type(tree) in (list, tuple):
        return type(tree)([snapshot(value, copies) for value in tree])
    return bytearray(tree) if type(tree) is bytearray else tree


def _copied(tensor: torch.Tensor, copies: dict[int, Any]) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return tensor.detach().cpu() if tensor.device.type != "cpu" else tensor.detach().clone()
    storage = tensor.untyped_storage()
    key = storage.data_ptr()
    if key not in copies:
        copies[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
    copy = torch.empty(0, dtype=tensor.dtype)
    copy.set_(copies[key], tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)
