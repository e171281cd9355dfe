"""Casting the floating-point tensors of a tree. Used by precision plugins and by forward plans."""

from __future__ import annotations

from typing import Any

import torch

from fabric.core.tree import flatten, unflatten

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class CastTo:
    """Casts floating-point tensors of a tree to `dtype` (None: `torch.get_default_dtype()` at call time)."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def __call__(self, tree: Any) -> Any:
        """`tree` with its floating-point tensors in the dtype; `tree` itself where all have it already."""
        dtype = self.dtype or torch.get_default_dtype()
        if isinstance(tree, torch.Tensor):
            return tree.to(dtype) if tree.is_floating_point() else tree
        leaves, spec = flatten(tree)
        cast = [
            leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
            for leaf in leaves
        ]
        # A container that needs no cast is not rebuilt: a forward may write into a cache that it was given.
        if all([new is old for new, old in zip(cast, leaves, strict=True)]):
            return tree
        return unflatten(cast, spec, tree)

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments, cast. Plain tensors, the common case, are not walked as trees."""
        dtype = self.dtype or torch.get_default_dtype()
        cast = [
            (a.to(dtype) if a.is_floating_point() else a) if a.__class__ in _PLAIN else self(a) for a in args
        ]
        return tuple(cast), {name: self(value) for name, value in kwargs.items()} if kwargs else kwargs
