"""Convert the leaves of nested data: to a device, to tensors, to numbers. Containers are not modified.

Called per batch by the data loader and by `Fabric`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fabric.core.errors import ConfigurationError
from fabric.core.lazy import lazy_names
from fabric.core.tree import LEAF, Spec, children, is_node, map_tree, unflatten

__getattr__ = lazy_names(__name__)

_BLOCKING = ("cpu", "mps")  # an asynchronous copy to these may be read before it is complete


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Return `batch` with every tensor, and every other object with a `to` method, on `device`.

    Args:
        batch: Any nesting of dict, list, tuple, namedtuple, dataclass; containers keep their type. Tensors on
            the device are returned without a copy. A container with a `to` method is moved by it.
        device: Copies to an accelerator do not block the host (they overlap if the source is pinned).
    """
    target = torch.device(device)
    return _move(batch, target, target.type not in _BLOCKING)


def convert_to_tensors(data: Any, device: torch.device | str | int) -> Any:
    """Return `data` with numbers, numpy arrays and numpy scalars as new tensors on `device`; tensors moved.

    Numbers get torch's default dtypes (bool: bool, int: int64, float: the default dtype); numpy's are kept.
    Other leaves are unchanged.
    """
    target = torch.device(device)
    return map_tree(lambda leaf: _to_tensor(leaf, target), data)


def convert_tensors_to_scalars(data: Any) -> Any:
    """Return `data` with every one-element tensor as a Python number.

    Raises:
        ConfigurationError: A tensor does not have exactly one element.
    """
    return map_tree(_to_scalar, data)


def _move(data: Any, device: torch.device, non_blocking: bool) -> Any:
    kind = type(data)
    if kind is Tensor:
        return data.to(device, non_blocking=non_blocking)
    if kind is dict:
        return {key: _move(value, device, non_blocking) for key, value in data.items()}
    if kind is list:
        return [_move(value, device, non_blocking) for value in data]
    if kind is tuple:
        return tuple([_move(value, device, non_blocking) for value in data])
    return _move_rare(data, device, non_blocking)


def _move_rare(data: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=non_blocking)
    # Before containers: torch's PackedSequence is a namedtuple, and one of its tensors must stay on CPU.
    if callable(getattr(type(data), "to", None)):
        moved = data.to(device)
        return data if moved is None else moved  # a `to` without `return self`
    if is_node(data):
        # One level only, not `map_tree`: a nested container may have a `to` method.
        items = children(data)
        spec = Spec(type(data), tuple([key for key, _ in items]), (LEAF,) * len(items))
        return unflatten([_move(value, device, non_blocking) for _, value in items], spec, data)
    if isinstance(data, Mapping):
        mapping: Any = type(data)
        return mapping({key: _move(value, device, non_blocking) for key, value in data.items()})
    return data


def _to_tensor(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device)
    if isinstance(leaf, bool | int | float | complex) and type(leaf).__module__ == "builtins":
        return torch.tensor(leaf, device=device)
    numpy = sys.modules.get("numpy")  # without it there are no arrays
    if numpy is None or not isinstance(leaf, numpy.ndarray | numpy.generic) or leaf.dtype.kind not in "biufc":
        return leaf
    # A copy in native byte order: torch supports no other, and in-place results must not change the user's.
    native = numpy.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(native).to(device)


def _to_scalar(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.numel() != 1:
        raise ConfigurationError(
            f"A tensor of shape {tuple(leaf.shape)} is not a scalar. Reduce it first: value.mean()."
        )
    return leaf.item()
