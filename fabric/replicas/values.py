"""`first_difference`: the first tensor whose values differ between ranks. The caller communicates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.replicas import report
from fabric.replicas.report import Distance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

TOLERANCE = 1e-6
"""Allowed difference, relative to a tensor's norm, since different device models round differently."""
_EXCHANGED_ELEMENTS = 1 << 20
"""Number of elements in one exchange."""


def first_difference(
    rows: Sequence[dict[str, Any]],
    tensors: dict[Any, Tensor | None],
    rank: int,
    exchange: Callable[[Any], list[Any]],
) -> tuple[str | None, str | None]:
    """Return the texts of the first difference and of the largest one within the tolerance; None: none.

    All ranks must call this.

    Args:
        rows: For each rank `entries`, its compared tensors by key.
        tensors: This rank's tensors by key and name.
        rank: This rank's number in the group.
        exchange: Returns the values that the ranks passed, in rank order.
    """
    small: tuple[float, str] | None = None
    for key in dict.fromkeys([key for row in rows for key in row["entries"]]):
        by_rank = {other: row["entries"][key] for other, row in enumerate(rows) if key in row["entries"]}
        text = report.structure_text(rows, by_rank)
        if text is not None:
            return text, None
        for entries in zip(*by_rank.values(), strict=True):
            ranks = dict(zip(by_rank, entries, strict=True))
            digests = {other: entry.digest for other, entry in ranks.items()}
            if len({*digests.values()}) < 2 or None in digests.values():  # None: may differ by rank
                continue
            name = entries[0].name
            size = max([entry.numel for entry in entries])
            distance = _distance(tensors.get((key, name)), digests, size, rank, exchange)
            if distance.relative > TOLERANCE:
                return report.value_text(rows, ranks, distance), None
            if distance.relative and (small is None or distance.relative > small[0]):
                small = distance.relative, name
    return None, None if small is None else report.small_text(*small)


def _distance(
    tensor: Tensor | None, digests: dict[int, Any], size: int, rank: int, exchange: Callable[[Any], list[Any]]
) -> Distance:
    """Return the distance, equal on all ranks. The first rank of each digest sends its values, in parts."""
    senders = {digest: holder for holder, digest in reversed(digests.items())}
    sends = tensor is not None and senders.get(digests.get(rank)) == rank
    flat = tensor.detach().reshape(-1) if tensor is not None and sends else None
    norm, squared_distances = 0.0, dict.fromkeys(senders.values(), 0.0)
    element, values = -1, dict[int, Any]()
    for start in range(0, size, _EXCHANGED_ELEMENTS):
        parts = exchange(None if flat is None else flat[start : start + _EXCHANGED_ELEMENTS].cpu())
        wide = {
            r: p.cdouble() if p.is_complex() else p.double() for r, p in enumerate(parts) if p is not None
        }
        base = wide[min(digests)]
        norm += float(base.abs().nan_to_num().square().sum())
        for other in squared_distances:
            equal = (base == wide[other]) | (base.isnan() & wide[other].isnan())
            if element < 0 and not equal.all():
                offset = int((~equal).nonzero()[0])
                element = start + offset
                values = {r: parts[senders[d]][offset].item() for r, d in digests.items()}
            squared = (base - wide[other]).masked_fill(equal, 0.0).abs().square().sum()
            squared_distances[other] += float(squared.nan_to_num(nan=torch.inf))
    largest = max(squared_distances.values())
    return Distance((largest / norm) ** 0.5 if norm else float(largest > 0), element, values)
