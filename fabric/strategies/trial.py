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


@contextmanager
def kept_buffers(modules: list[Module]) -> Iterator[None]:
    """Context after which the modules have the same buffers, with what was in them."""
    held = [(module._buffers, dict(module._buffers)) for module in modules]
    tensors = [tensor for _, buffers in held for tensor in buffers.values() if tensor is not None]
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for now, buffers in held:
            now.update(buffers)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)


@contextmanager
def untouched(modules: list[Module], device: torch.device) -> Iterator[None]:
    """The same of all buffers, modes, hooks, other attributes, and random generators. Nobody is warned."""
    attributes = [vars(module) for module in modules]
    tables = [value for held in attributes for name, value in held.items() if _is_table(name, value)]
    before = [(held, dict(held)) for held in attributes + tables]
    with kept_buffers(modules), fork_rng(device), warnings.catch_warnings():
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
    """Describe how the leaves of two outputs differ by more than rounding; "" if they do not.

    Args:
        expected: Leaves; each tensor says by its dtype what rounding is.
        found: Leaves.
        numbers: Whether those that are no tensors count, too.
    """
    if len(expected) != len(found):
        return f"{len(found)} outputs in place of {len(expected)}"
    for one, other in zip(expected, found, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
            off, limit = distance(one, other), rounding(one)
            if not off <= limit:
                return f"they differ by {off:.1e} of their size, where rounding makes {limit:.0e} at most"
        elif isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            return f"{_shown(other)} in place of {_shown(one)}"
        elif numbers and isinstance(one, int | float) and not _is_close(one, other):
            return f"{other} in place of {one}"
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
    """Return the upper bound of `distance` between tensors that differ only by the order of additions.

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


def _is_close(one: float, other: Any) -> bool:
    return isinstance(other, int | float) and math.isclose(one, other, rel_tol=1e-4)


def _shown(leaf: Any) -> str:
    return f"shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
