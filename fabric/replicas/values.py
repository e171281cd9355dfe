"""The first tensor that differs between ranks, by value. Communicates by a function that it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.replicas import report
from fabric.replicas.report import Distance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
        rows: Of each rank: `entries`, by key, of what it holds: (name, shape, digest, version, hooked).
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
    """All ranks compute the same; of ranks with equal digests the first one sends its values."""
    senders = {digest: place for place, digest in reversed(digests.items())}
    first = min(digests)
    sends = own is not None and senders.get(digests.get(rank)) == rank
    norm, apart = 0.0, dict.fromkeys(senders.values(), 0.0)
    place, values = -1, list[Any]()
    for start, parts in _parts(own if sends else None, size, exchange):
        base = _numbers(parts[first])
        norm += float(base.nan_to_num().square().sum())
        for other in apart:
            there = _numbers(parts[other])
            equal = (base == there) | (base.isnan() & there.isnan())
            if place < 0 and not equal.all():
                at = int((~equal).flatten().nonzero()[0])
                place = start + at
                values = [
                    parts[senders[digests[p]]].reshape(-1)[at].item() if p in digests else None
                    for p in range(max(digests) + 1)
                ]
            apart[other] += float(
                (base - there).masked_fill(equal, 0.0).square().sum().nan_to_num(nan=torch.inf)
            )
    most = max(apart.values())
    return Distance((most / norm) ** 0.5 if norm else (1.0 if most else 0.0), place, values)


def _parts(
    own: Tensor | None, size: int, exchange: Callable[[Any], list[Any]]
) -> Iterator[tuple[int, list[Any]]]:
    flat = None if own is None else own.detach().reshape(-1)
    for start in range(0, size, _PART):
        yield start, exchange(None if flat is None else flat[start : start + _PART].cpu())


def _numbers(part: Tensor) -> Tensor:
    return torch.view_as_real(part).double().flatten() if part.is_complex() else part.double()
