"""The number of items in the losses of one step, over all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fabric.collectives.objects import gather_objects
from fabric.core.errors import CollectiveMismatch

if TYPE_CHECKING:
    from fabric.collectives.channel import Channel


def total_items(count: float | int, part: int, channel: Channel, models: str) -> float | int:
    """The sum of all ranks' counts, those of one part of the data once; exact for ints. All ranks.

    Args:
        count: Of this rank; finite.
        part: Which part of the data this rank has. Ranks that have the same one count alike.
        channel: All ranks.
        models: Names of those whose gradients they are for.

    Raises:
        CollectiveMismatch: Ranks that have the same part counted differently; on all ranks.
    """
    if channel.world_size == 1:
        return count
    told = gather_objects((part, count), channel, f"normalize_gradients of {models}")
    counts: dict[int, float | int] = {}
    for place, each in told:
        first = counts.setdefault(place, each)
        # Sums of floats on two devices may differ by rounding.
        if not (first == each or (isinstance(each, float) and math.isclose(first, each, rel_tol=1e-5))):
            lines = [
                f"  rank {rank}: {n} items of part {at} of the data" for rank, (at, n) in enumerate(told)
            ]
            raise CollectiveMismatch(
                "fabric.normalize_gradients: ranks that share a model and its data counted different items.\n"
                + "\n".join(lines)
                + "\nLet each of them count all items of their batches."
            )
    return sum(counts.values())
