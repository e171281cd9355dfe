"""The first tensor that differs between ranks, by value. Communicates by a function that it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.replicas import report
from fabric.replicas.report import Distance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

TOLERANCE = 1e-6
"""Of a tensor's norm: up to it ranks may differ. Devices of two kinds round differently."""
_PART = 1 << 20
"""Elements that are exchanged at a time."""


def first_difference(
    rows: Sequence[dict[str, Any]],
    tensors: dict[Any, Tensor | None],
    rank: int,
    exchange: Callable[[Any], list[Any]],
) -> tuple[str | None, str | None]:
    """Return the texts for the first difference, and for one within the tolerance; None for those not found.

    All ranks must call this.

    Args:
        rows: Of each rank: `entries`, by key, the entries of what it holds.
        tensors: This rank's tensors by key and name.
        rank: This rank's place in the group.
        exchange: Returns what each rank passed.
    """
    small: tuple[float, str] | None = None
    for key in dict.fromkeys([key for row in rows for key in row["entries"]]):
        held = {place: row["entries"][key] for place, row in enumerate(rows) if key in row["entries"]}
        text = report.structure_text(rows, held)
        if text is not None:
            return text, None
        for entries in zip(*held.values(), strict=True):
            ranks = dict(zip(held, entries, strict=True))
            digests = {place: entry.digest for place, entry in ranks.items()}
            if len({*digests.values()}) < 2 or None in digests.values():  # None: a rank keeps it for itself
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
    own: Tensor | None, digests: dict[int, Any], size: int, rank: int, exchange: Callable[[Any], list[Any]]
) -> Distance:
    """Return the same on all ranks. Of ranks with equal digests the first one sends its values, in parts."""
    senders = {digest: place for place, digest in reversed(digests.items())}
    sends = own is not None and senders.get(digests.get(rank)) == rank
    flat = own.detach().reshape(-1) if own is not None and sends else None
    norm, apart = 0.0, dict.fromkeys(senders.values(), 0.0)
    place, values = -1, dict[int, Any]()
    for start in range(0, size, _PART):
        parts = exchange(None if flat is None else flat[start : start + _PART].cpu())
        wide = {
            r: p.cdouble() if p.is_complex() else p.double() for r, p in enumerate(parts) if p is not None
        }
        base = wide[min(digests)]
        norm += float(base.abs().nan_to_num().square().sum())
        for other in apart:
            equal = (base == wide[other]) | (base.isnan() & wide[other].isnan())
            if place < 0 and not equal.all():
                at = int((~equal).nonzero()[0])
                place, values = start + at, {r: parts[senders[d]][at].item() for r, d in digests.items()}
            far = (base - wide[other]).masked_fill(equal, 0.0).abs().square().sum()
            apart[other] += float(far.nan_to_num(nan=torch.inf))
    most = max(apart.values())
    return Distance((most / norm) ** 0.5 if norm else float(most > 0), place, values)
