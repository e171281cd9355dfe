"""Helpers of trials: small forwards in the first call of a model whose results are compared.

A trial restores all state. Used by layouts that are correct only for some models. `fabric check` compares
whole steps.
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
def preserve_buffers(modules: list[Module]) -> Iterator[None]:
    """Context that restores the modules' buffers and their values."""
    saved = [(module._buffers, dict(module._buffers)) for module in modules]
    tensors = [tensor for _, buffers in saved for tensor in buffers.values() if tensor is not None]
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for current, buffers in saved:
            current.update(buffers)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)


@contextmanager
def preserve_state(modules: list[Module], device: torch.device) -> Iterator[None]:
    """Context that restores buffers, modes, hooks and other attributes of the modules, and random generators.
    Warnings are suppressed.
    """
    attributes = [vars(module) for module in modules]
    tables = [value for one in attributes for name, value in one.items() if _is_table(name, value)]
    before = [(one, dict(one)) for one in attributes + tables]
    with preserve_buffers(modules), fork_rng(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a trial runs training code in another mode
        try:
            yield
        finally:
            for current, saved in before:
                current.clear()
                current.update(saved)


def _is_table(name: str, value: Any) -> bool:
    """Whether an attribute of a module is a dictionary of parameters, buffers, submodules or hooks."""
    return name.startswith("_") and isinstance(value, dict)


def difference(expected: list[Any], found: list[Any], numbers: bool = False) -> str:
    """Describe the first difference of two outputs that is more than rounding; "" if there is none.

    Args:
        expected: Leaves of one output; the dtype of each tensor determines the rounding error.
        found: Leaves of the other output.
        numbers: Whether leaves that are numbers are compared, too.
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
    """Return the norm of the difference of two tensors of one shape, relative to that of the first."""
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
        tensor: A result.
        compute: Dtype of the computation, if it is narrower than the result's.
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
