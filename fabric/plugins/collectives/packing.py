"""Tensors that travel together, as one flat tensor. Pure: knows dtypes and shapes, nothing of ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._utils import _flatten_dense_tensors as flatten_tensors
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PACK_LIMIT = 1 << 20
"""Bytes up to which a leaf is copied into a flat tensor; beyond, the copy costs more than a collective."""
_ALIGN = 16
"""Bytes of the largest element: any dtype can be read from where a part begins."""


class Label(NamedTuple):
    """What a receiver must know of a tensor before its bytes arrive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool
    is_parameter: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def get_device(self) -> int:
        """As of a tensor: of the host, or of the rank's own device."""
        return -self.on_host

    def dress(self, values: Tensor, device: torch.device) -> Tensor:
        """The tensor as the sender has it, of the same elements: on the host, or on `device`."""
        values = values.view(self.shape)
        values = values if self.on_host else values.to(device)
        if self.is_parameter:
            return Parameter(values, self.requires_grad)
        return values.requires_grad_() if self.requires_grad else values


def label_of(tensor: Tensor) -> Label:
    """What others must know of a tensor."""
    grad = tensor.requires_grad and tensor.is_leaf
    return Label(tuple(tensor.shape), tensor.dtype, tensor.is_cpu, grad, type(tensor) is Parameter)


def buckets(like: Sequence[Any], mixed: bool = False) -> list[list[int]]:
    """Positions of what travels together: of a dtype (or `mixed`) and device; large ones alone, none empty.

    Args:
        like: Tensors or labels.
        mixed: Whether tensors of several dtypes travel together: as bytes.
    """
    groups: dict[Any, list[int]] = {}
    for position, one in enumerate(like):
        size = one.nbytes
        if size:
            key = position if size > PACK_LIMIT else (mixed or one.dtype, one.get_device())
            groups.setdefault(key, []).append(position)
    return list(groups.values())


def join(tensors: list[Tensor]) -> Tensor:
    """The elements of tensors of one dtype, one after the other; no copy of a single contiguous one."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else flatten_tensors(tensors)


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of `tensor` as flat bytes, row-major; shares its memory where that is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # one element counts as contiguous with any stride
    return plain.view(torch.uint8)


def pack(tensors: list[Tensor], parts: int = 1) -> Tensor:
    """(parts, bytes): each tensor split along dim 0; those of one device, of one dtype side by side."""
    rows = []
    for places in _by_dtype(tensors).values():
        group = [tensors[i].detach() for i in places]
        if parts == 1:
            flat = join(group)
        else:
            cut = [t.resolve_conj().resolve_neg().reshape(parts, t.numel() // parts) for t in group]
            flat = torch.cat(cut, dim=1) if len(cut) > 1 else cut[0]
        rows.append(as_bytes(flat).view(parts, -1))
    if len(rows) < 2:
        return rows[0] if rows else torch.empty(parts, 0, dtype=torch.uint8)
    return torch.cat([torch.nn.functional.pad(row, (0, -row.shape[1] % _ALIGN)) for row in rows], dim=1)


def packed_size(like: Sequence[Any]) -> int:
    """Bytes of what `pack` makes of such tensors."""
    sizes = [sum([like[i].nbytes for i in places]) for places in _by_dtype(like).values()]
    return sizes[0] if len(sizes) == 1 else sum([size + -size % _ALIGN for size in sizes])


def unpack(rows: Tensor, like: Sequence[Any], parts: int = 1) -> list[Tensor]:
    """For each tensor (rows, numel / parts) elements out of what `pack` made on several ranks. No copies.

    Args:
        rows: (rows, bytes).
        like: The tensors that were packed, or their labels.
        parts: As for `pack`.
    """
    found: list[Any] = [None] * len(like)
    start = 0
    for dtype, places in _by_dtype(like).items():
        widths = [like[i].numel() // parts for i in places]
        end = start + sum(widths) * dtype.itemsize
        columns = rows[:, start:end].view(dtype).split(widths, dim=1)
        for i, column in zip(places, columns, strict=True):
            found[i] = column
        start = end + -end % _ALIGN
    return found


def _by_dtype(like: Sequence[Any]) -> dict[torch.dtype, list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for place, one in enumerate(like):
        groups.setdefault(one.dtype, []).append(place)
    return groups


def all_on_host(tensors: list[Tensor]) -> bool:
    """Whether every tensor is in host memory, so that it may ride in a frame."""
    return all([t.is_cpu for t in tensors])
