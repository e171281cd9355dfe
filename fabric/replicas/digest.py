"""64-bit digests of tensors, computed on their device. No message, and no host sync.

A digest is a sum of 64-bit words modulo 2**64, each weighted by its position. Tensors over 256 KiB are first
summed in rows of 32 words, so that memory is read once; a permutation within such a row is not detected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_WORD_BYTES = 8
"""Bytes of a word."""
_ROW_WORDS = 32
"""Words of a row; with narrower rows, summing takes longer than reading."""
_CHUNK_WORDS = 1 << 20
"""Number of words whose row sums fit into the cache of a core."""
_EXACT_BYTES = 1 << 18
"""Tensors up to this size are packed together, and each of their words has a different weight."""


WRITES = "in-place changes"
"""The unit of `ComparedTensor.shape` for sharded tensors."""


class ComparedTensor(NamedTuple):
    """A replicated tensor of this rank; as sent to other ranks, it has a digest in place of `tensor`."""

    name: str
    shape: str = ""
    """Dtype and shape; of a sharded tensor its number of changes; "": the tensor may differ by rank."""
    writes: int = -1
    """In-place changes of the tensor since its creation, as torch counts them; -1: not comparable."""
    hooked: bool = False
    """Whether it has a gradient hook of the user."""
    tensor: Tensor | None = None
    digest: int | None = None
    numel: int = 0

    def without_data(self) -> ComparedTensor:
        """Return the entry with a digest in place of the tensor, for other ranks; waits for the device."""
        if self.tensor is None:
            return self
        digest = int(digest_of([self.tensor]).item())
        return self._replace(tensor=None, digest=digest, numel=self.tensor.numel())


def digest_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return one digest of all tensors in order, int64 of shape (), on the device of the first one.

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
    parts += [
        _digest(torch.cat(tensors_of_device) if len(tensors_of_device) > 1 else tensors_of_device[0])
        for tensors_of_device in small.values()
    ]
    if not parts:
        return torch.zeros((), dtype=torch.int64)
    first = parts[0].device
    return _weighted_sum(torch.stack([part.to(first) for part in parts]))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor as flat bytes; a view if they are adjacent in memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_contiguous():
        flat = plain.view(-1)
    elif torch.ops.aten.is_non_overlapping_and_dense(plain):  # e.g. channels_last: no copy
        flat = plain.as_strided((plain.numel(),), (1,))
    else:
        flat = plain.contiguous().view(-1)
    return flat.view(torch.uint8)


def _digest(raw: Tensor) -> Tensor:
    words, tail = raw.split([raw.numel() - raw.numel() % _WORD_BYTES, raw.numel() % _WORD_BYTES])
    if tail.numel():
        padded = torch.nn.functional.pad(tail, (0, _WORD_BYTES - tail.numel())).view(torch.int64)
        if not words.numel():
            return _weighted_sum(padded)
        return _digest(words) * 3 + padded[0]
    if words.storage_offset() % _WORD_BYTES:  # a view of another dtype must be aligned
        words = words.clone()
    words = words.view(torch.int64)
    if words.numel() * _WORD_BYTES <= _EXACT_BYTES:
        return _weighted_sum(words)
    row_words = words.numel() - words.numel() % _ROW_WORDS
    weights = torch.arange(1, 2 * _CHUNK_WORDS // _ROW_WORDS, 2, device=words.device)
    parts = []
    for chunk in words[:row_words].split(_CHUNK_WORDS):
        sums = chunk.view(-1, _ROW_WORDS).sum(1)
        parts.append(sums.mul_(weights[: sums.numel()]).sum())
    parts.append(words[row_words:].sum())
    return _weighted_sum(torch.stack(parts))


def _weighted_sum(words: Tensor) -> Tensor:
    weights = torch.arange(1, 2 * words.numel(), 2, device=words.device)
    return (words * weights).sum()
