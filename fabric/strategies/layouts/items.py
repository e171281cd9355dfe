"""How many items the losses of one step had, over all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fabric.core.errors import CollectiveMismatch
from fabric.plugins.collectives.gather import gather_tree

if TYPE_CHECKING:
    from fabric.plugins.collectives.channel import Channel


def total_items(count: float | int, part: int, channel: Channel) -> float | int:
    """The sum of all ranks' counts, those of one part of the data once; exact for ints. All ranks.

    Args:
        count: Of this rank; finite, less than 2**63.
        part: Which part of the data this rank has. Ranks that have the same one count alike.
        channel: All ranks.

    Raises:
        CollectiveMismatch: Ranks that have the same part counted differently; on all ranks.
    """
    if channel.world_size == 1:
        return count
    whole = isinstance(count, int)
    bits = torch.tensor([count], dtype=torch.int64 if whole else torch.float64, device="cpu")
    message = torch.cat([torch.tensor([whole, part], device="cpu"), bits.view(torch.int64)])
    # Gathered, and not added up: sums of float64 lose ints beyond 2**53, and an error shows each rank's.
    rows = gather_tree(message, channel, verb="normalize_gradients")
    floats = rows.view(torch.float64)[:, 2].tolist()
    counts: dict[int, float | int] = {}
    for (is_int, place, bits_), number in zip(rows.tolist(), floats, strict=True):
        each = bits_ if is_int else number
        if not _same(counts.setdefault(place, each), each):
            raise CollectiveMismatch(_table(rows, floats))
    return sum(counts.values())


def _same(one: float | int, other: float | int) -> bool:
    """Whether two ranks counted the same items; sums of floats on two devices may differ by rounding."""
    return one == other or (isinstance(other, float) and math.isclose(one, other, rel_tol=1e-5))


def _table(rows: torch.Tensor, floats: list[float]) -> str:
    lines = [
        f"  rank {rank}: {bits if is_int else floats[rank]} items of part {part} of the data"
        for rank, (is_int, part, bits) in enumerate(rows.tolist())
    ]
    return (
        "fabric.normalize_gradients: ranks that share a model and its data counted different items.\n"
        + "\n".join(lines)
        + "\nLet each of them count all items of their batches."
    )
