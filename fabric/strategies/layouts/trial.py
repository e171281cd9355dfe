"""Trials of a few rows or positions in the first calls of a model: they leave no trace, numbers are compared.

For layouts that are right only for models of a certain kind. `fabric check` compares whole steps.
"""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.utilities.random_stream import fork_rng

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module


Slots = list[tuple[dict[str, Any], str]]
"""Places of tensors: a module's dictionary, and the name in it."""


def buffers_of(modules: list[Module]) -> Slots:
    """Where these modules have their buffers."""
    return [(module._buffers, name) for module in modules for name in module._buffers]


@contextmanager
def kept(slots: Slots) -> Iterator[None]:
    """Context after which the same tensors are in these places, with what was in them."""
    held = [(places, name, places[name]) for places, name in slots]
    values = [None if tensor is None else tensor.detach().clone() for _, _, tensor in held]
    try:
        yield
    finally:
        for (places, name, tensor), value in zip(held, values, strict=True):
            places[name] = tensor
            if value is not None:
                tensor.data.copy_(value)


@contextmanager
def untouched(modules: list[Module], device: torch.device) -> Iterator[None]:
    """The same of all buffers, modes, hooks, other attributes, and random generators. Nobody is warned."""
    attributes = [vars(module) for module in modules]
    tables = [value for held in attributes for name, value in held.items() if _is_table(name, value)]
    before = [(held, dict(held)) for held in attributes + tables]
    with kept(buffers_of(modules)), fork_rng(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is meant for training, and is not so here
        try:
            yield
        finally:
            for now, then in before:
                now.clear()
                now.update(then)


def _is_table(name: str, value: Any) -> bool:
    """Whether it is a table of a module's parts or hooks."""
    return name.startswith("_") and isinstance(value, dict)


def difference(expected: list[Any], found: list[Any], numbers: bool = False) -> str:
    """How the leaves of two outputs differ by more than rounding; "" where they do not.

    Args:
        expected: Leaves; each tensor says by its dtype what rounding is.
        found: Leaves.
        numbers: Whether those that are no tensors count, too.
    """
    if len(expected) != len(found):
        return f"{len(found)} outputs in place of {len(expected)}"
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor):
            return f"{type(other).__name__} in place of {type(one).__name__}"
        if not isinstance(one, torch.Tensor):
            if numbers and isinstance(one, int | float) and not _same_number(one, other):
                return f"{other} in place of {one}"
            continue
        if one.shape != other.shape:
            return f"shape {list(other.shape)} in place of {list(one.shape)}"
        off, limit = distance(one, other), rounding(one)
        if not off <= limit:
            return f"they differ by {off:.1e} of their size, where rounding makes {limit:.0e} at most"
    return ""


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference of two tensors of one shape, as a part of that of the first."""
    if one.dtype is torch.bool or not (one.is_floating_point() or one.is_complex()):
        return float((one != other).any())
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return float("inf")
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one[finite].to(wide), other[finite].to(wide)
    size = one.norm()
    return float((one - other).norm() / size) if size else float((one - other).norm())


def rounding(tensor: Tensor, compute: torch.dtype | None = None) -> float:
    """What `distance` stays below where only the order of additions differs.

    Args:
        tensor: What was computed.
        compute: In what, where outputs are wider.
    """
    if (
        torch.is_autocast_enabled(tensor.device.type)
        or min(tensor.itemsize, (compute or tensor.dtype).itemsize) < 4
    ):
        return 1.5e-2
    if tensor.dtype is torch.float64:
        return 1e-9
    coarse = tensor.device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"
    return 2e-3 if coarse or (tensor.is_cuda and torch.backends.cuda.matmul.allow_tf32) else 2e-5


def _same_number(one: float, other: Any) -> bool:
    return isinstance(other, int | float) and (one == other or math.isclose(one, other, rel_tol=1e-4))
