"""64-bit digests of tensors, computed where the tensors are. No message, and no host sync.

A digest is a sum of 64-bit words modulo 2**64, each weighted by its position. Tensors over 256 KiB are summed
in rows of 32 words first, so that memory is read once; a permutation inside of such a row is not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_WORD = 8
"""Bytes."""
_ROW = 32
"""Words of a row; narrower ones take longer to sum than to read."""
_CHUNK = 1 << 20
"""Words whose row sums stay in the cache of a core."""
_EXACT_BYTES = 1 << 18
"""Tensors up to this size are packed together, and each word has a weight of its own."""


WRITES = "in-place changes"
"""The unit of `ComparedTensor.shape` for sharded tensors."""


class ComparedTensor(NamedTuple):
    """A tensor of this rank that others hold, too; without `tensor` as other ranks see it."""

    name: str
    shape: str = ""
    """Dtype and shape; of a sharded tensor its number of changes; "": the rank keeps it for itself."""
    writes: int = -1
    """In-place changes of the tensor since it was made, as torch counts them; -1: not comparable."""
    hooked: bool = False
    """Whether it has a gradient hook of the user's."""
    tensor: Tensor | None = None
    digest: int | None = None
    numel: int = 0

    def sent(self) -> ComparedTensor:
        """Return what other ranks need; waits for the device."""
        if self.tensor is None:
            return self
        digest = int(digest_of([self.tensor]).item())
        return self._replace(tensor=None, digest=digest, numel=self.tensor.numel())


def digest_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return one digest of all tensors in their order, int64 of shape (), on the device of the first one.

    Equal bits give equal digests on every rank whose tensors have the same shapes, dtypes and order.
    """
    small: dict[torch.device, list[Tensor]] = {}
    parts = []
    for tensor in tensors:
        raw = _bytes_of(tensor)
        if raw.numel() > _EXACT_BYTES:
            parts.append(_digest(raw))
        elif raw.numel():
            small.setdefault(raw.device, []).append(raw)
    parts += [_digest(torch.cat(some) if len(some) > 1 else some[0]) for some in small.values()]
    if not parts:
        return torch.zeros((), dtype=torch.int64)
    first = parts[0].device
    return _weighted_sum(torch.stack([part.to(first) for part in parts]))


def _bytes_of(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor as flat bytes; a view unless they are not adjacent in memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_contiguous():
        flat = plain.view(-1)
    elif torch.ops.aten.is_non_overlapping_and_dense(plain):  # e.g. channels_last: no copy
        flat = plain.as_strided((plain.numel(),), (1,))
    else:
        flat = plain.contiguous().view(-1)
    return flat.view(torch.uint8)


def _digest(raw: Tensor) -> Tensor:
    words, rest = raw.split([raw.numel() - raw.numel() % _WORD, raw.numel() % _WORD])
    if rest.numel():
        padded = torch.nn.functional.pad(rest, (0, _WORD - rest.numel())).view(torch.int64)
        if not words.numel():
            return _weighted_sum(padded)
        return _digest(words) * 3 + padded[0]
    if words.storage_offset() % _WORD:  # a view of another dtype must be aligned
        words = words.clone()
    words = words.view(torch.int64)
    if words.numel() * _WORD <= _EXACT_BYTES:
        return _weighted_sum(words)
    whole = words.numel() - words.numel() % _ROW
    weights = torch.arange(1, 2 * _CHUNK // _ROW, 2, device=words.device)
    parts = []
    for chunk in words[:whole].split(_CHUNK):
        sums = chunk.view(-1, _ROW).sum(1)
        parts.append(sums.mul_(weights[: sums.numel()]).sum())
    parts.append(words[whole:].sum())
    return _weighted_sum(torch.stack(parts))


def _weighted_sum(words: Tensor) -> Tensor:
    weights = torch.arange(1, 2 * words.numel(), 2, device=words.device)
    return (words * weights).sum()
