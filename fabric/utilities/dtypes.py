"""Casting the floating-point tensors of a tree. Used by precision plugins and by forward plans."""

from __future__ import annotations

from typing import Any

import torch

from fabric.core.tree import map_tree


class CastTo:
    """Casts floating-point tensors of a tree to `dtype` (None: `torch.get_default_dtype()` at call time)."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def __call__(self, tree: Any) -> Any:
        """`tree` with its floating-point tensors in the dtype; tensors that have it already are not copied."""
        return map_tree(self._leaf, tree)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(self.dtype or torch.get_default_dtype())
        return leaf
