"""Total number of items in the losses of one step, over all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fabric.collectives.objects import gather_objects
from fabric.core.errors import CollectiveMismatch

if TYPE_CHECKING:
    from fabric.collectives.channel import Channel


def total_items(count: float | int, shard: int, channel: Channel, models: str) -> float | int:
    """Return the sum of the counts of all data shards, exact for ints. All ranks must call this.

    Args:
        count: Number of items of this rank; finite.
        shard: Index of this rank's data shard. Ranks with the same shard must pass the same count.
        channel: All ranks.
        models: Names of the models whose gradients are divided, for the call check.

    Raises:
        CollectiveMismatch: Ranks with the same shard passed different counts; on all ranks.
    """
    if channel.world_size == 1:
        return count
    gathered = gather_objects((shard, count), channel, f"normalize_gradients of {models}")
    counts: dict[int, float | int] = {}
    for index, each in gathered:
        first = counts.setdefault(index, each)
        # Sums of floats on different devices may differ by rounding.
        if not (first == each or (isinstance(each, float) and math.isclose(first, each, rel_tol=1e-5))):
            lines = [
                f"  rank {rank}: {n} items of part {index} of the data"
                for rank, (index, n) in enumerate(gathered)
            ]
            raise CollectiveMismatch(
                "fabric.normalize_gradients: ranks that share a model and its data counted different items.\n"
                + "\n".join(lines)
                + "\nLet each of them count all items of their batches."
            )
    return sum(counts.values())
