"""Checkpoint data in the types that `torch.load(weights_only=True)` reads, and back. Unknown types fail at save."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from pathlib import PurePath
from typing import Any

import torch

from fabric.core.errors import ArgumentTypeError
from fabric.core.tree import map_tree

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device, torch.layout,
)  # fmt: skip
_TAG = "__fabric_type__"


def to_portable(data: Any, name: str) -> Any:
    """`data` in types that safe loading reads; paths and numpy values become tagged dictionaries.

    Args:
        data: Any nesting of dict, list, tuple, set with plain values, tensors, paths and numpy arrays in it.
        name: How the user calls it, for the error text (`state['config']`).

    Raises:
        ArgumentTypeError: A value of another type; the message names its place.
    """
    kind = type(data)
    if kind in _PLAIN or isinstance(data, torch.Tensor):
        return data
    if kind in (dict, OrderedDict, Counter):
        return kind(
            {_portable_key(key, name): to_portable(value, f"{name}[{key!r}]") for key, value in data.items()}
        )
    if kind in (list, tuple):
        return kind([to_portable(value, f"{name}[{i}]") for i, value in enumerate(data)])
    if kind is set:
        return {to_portable(value, f"{name} (in the set)") for value in data}
    if isinstance(data, PurePath):
        return {_TAG: "path", "value": str(data)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(data, numpy.ndarray | numpy.generic) and data.dtype.kind in "biufc":
        tag = "ndarray" if isinstance(data, numpy.ndarray) else "numpy_scalar"
        return {_TAG: tag, "value": torch.from_numpy(numpy.array(data)), "dtype": str(data.dtype)}
    if isinstance(data, dict) and not hasattr(kind, "__dataclass_fields__"):
        return to_portable(dict(data), name)
    raise ArgumentTypeError(_refusal(data, name))


def from_portable(data: Any) -> Any:
    """Undo `to_portable`: tagged dictionaries become paths and numpy values again."""
    if isinstance(data, dict):
        if _TAG in data:
            return _untag(data)
        for key, value in data.items():
            if not isinstance(value, torch.Tensor):
                data[key] = from_portable(value)
        return data
    if type(data) in (list, tuple):
        return type(data)([from_portable(value) for value in data])
    return data


def detach_from_file(data: Any) -> Any:
    """A copy whose tensors own their memory: a memory-mapped file may be replaced while they live."""
    return map_tree(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, data)


def _portable_key(key: Any, name: str) -> Any:
    if type(key) in _PLAIN or (type(key) is tuple and all([type(part) in _PLAIN for part in key])):
        return key
    raise ArgumentTypeError(f"{name} has the key {key!r} of type {type(key).__name__}. Use str or int keys.")


def _untag(data: dict[str, Any]) -> Any:
    if data[_TAG] == "path":
        from pathlib import Path

        return Path(data["value"])
    array = data["value"].numpy().astype(data["dtype"], copy=False)
    return array if data[_TAG] == "ndarray" else array[()]


def _refusal(data: Any, name: str) -> str:
    kind = type(data)
    if hasattr(kind, "_fields"):
        way = f"Save {name}._asdict()."
    elif hasattr(kind, "__dataclass_fields__"):
        way = f"Save dataclasses.asdict({name})."
    else:
        way = "Save plain data (numbers, strings, tensors, dict, list, tuple), or give it state_dict() and load_state_dict()."
    return f"{name} is a {kind.__module__}.{kind.__qualname__}, which safe loading would not read back. {way}"
