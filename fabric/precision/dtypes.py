"""Casts of the floating-point and complex tensors of a tree, and tensors as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.tree import flatten, is_node, unflatten

if TYPE_CHECKING:
    from torch import Tensor

_TENSOR = torch.Tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}
"""Complex dtypes by real dtype. torch supports few operations of complex32, so halves have no entry."""


class CastTo:
    """Casts floating-point tensors of a tree to `dtype` (None: `torch.get_default_dtype()` at call time).

    Complex tensors are cast to the corresponding complex dtype: complex128 for float64.
    """

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def __call__(self, tree: Any) -> Any:
        """Return `tree` with floating-point tensors in the dtype; `tree` itself if all have it already."""
        dtype = self.dtype or torch.get_default_dtype()
        if isinstance(tree, torch.Tensor):
            if tree.is_complex():
                dtype = _COMPLEX.get(dtype, tree.dtype)
            elif not tree.is_floating_point():
                return tree
            return tree.to(dtype)
        kind = type(tree)
        if kind is dict or kind is list or kind is tuple:
            return self._container(tree, kind, dtype)
        if not is_node(tree):
            return tree
        leaves, spec = flatten(tree)
        others = [isinstance(leaf, torch.Tensor) and leaf.dtype is not dtype for leaf in leaves]
        cast = [self(leaf) if other else leaf for leaf, other in zip(leaves, others, strict=True)]
        # A container without a cast is not copied: a forward may write into a cache that it was passed.
        if all([new is old for new, old in zip(cast, leaves, strict=True)]):
            return tree
        return unflatten(cast, spec, tree)

    def _container(self, tree: Any, kind: type, dtype: torch.dtype) -> Any:
        """A plain container, rebuilt if something in it was cast. Its tensors cost no frame."""
        olds: Any = tree.values() if kind is dict else tree
        news = [
            (old if old.dtype is dtype else old.to(dtype) if old.is_floating_point() else self(old))
            if type(old) is _TENSOR
            else self(old)
            for old in olds
        ]
        for new, old in zip(news, olds, strict=True):
            if new is not old:
                return dict(zip(tree, news, strict=True)) if kind is dict else kind(news)
        return tree

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments, cast. Plain tensors, the common case, are not flattened as trees."""
        dtype = self.dtype or torch.get_default_dtype()
        cast = [a.to(dtype) if type(a) in _PLAIN and a.is_floating_point() else self(a) for a in args]
        return tuple(cast), {name: self(value) for name, value in kwargs.items()} if kwargs else kwargs


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as flat bytes, row-major; a view if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # a single element is contiguous with any stride
    return plain.view(torch.uint8)
