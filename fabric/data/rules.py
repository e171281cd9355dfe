"""The rule that shards items in global order over ranks, for indices and for samples.

With `world` ranks and `batch` items per rank, global batch k has positions [k*world*batch,
(k+1)*world*batch) of the order. Rank r takes every world-th position of it, starting at r.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNEVEN = ("pad", "exact", "drop", "error")


class Shard(NamedTuple):
    """The index of this rank's shard of the data, and the number of shards."""

    rank: int
    world: int


class RankBatch(NamedTuple):
    """One batch of one rank."""

    items: list[Any]
    end: int
    """The position in the global order after this global batch, where a resumed run continues."""
    incomplete: bool
    """Whether some ranks get no batch of this global batch."""
    last: bool
    """Whether the order has been read to its end."""
    snapshot: Any
    """The value of the caller's `snapshot` function when the global batch had been drawn."""


class ShardingRule(NamedTuple):
    """The rule that forms global batches.

    Args:
        shard: This rank's shard.
        batch: Items per rank. None: items are whole batches that cannot be split; each rank gets one.
        drop_last: Leave out the last, incomplete global batch.
        uneven: Policy for a last, incomplete global batch that does not divide by the number of ranks. "pad"
            repeats the first items. "exact" spreads it as evenly as possible; fewer items than ranks are
            added to the batches before. "drop" leaves out the remainder. "error" raises.
    """

    shard: Shard
    batch: int | None
    drop_last: bool
    uneven: str

    @property
    def size(self) -> int:
        """Items in a global batch."""
        return (self.batch or 1) * self.shard.world

    def rank_batches(
        self,
        draw: Callable[[int], list[Any]],
        start: int = 0,
        first: list[Any] | None = None,
        snapshot: Callable[[int], Any] | None = None,
    ) -> Iterator[RankBatch]:
        """Yield this rank's batches.

        Args:
            draw: Returns the next n items of the order, fewer at its end.
            start: The position of the first item that `draw` returns.
            first: The epoch's first items, up to the number of ranks, if `start` is after them.
            snapshot: Called with the index of each global batch when it has been drawn.

        Raises:
            ConfigurationError: Items are left over under "error".
        """
        (rank, world), size, first = self.shard, self.size, list(first or [])
        # Whether a remainder of fewer items than ranks is added to the global batch before.
        merges_tail = self.uneven == "exact" and world > 1 and self.batch is not None and not self.drop_last
        pending: RankBatch | None = None  # the previous batch, to which the remainder may be added
        position, index = start, 0
        while len(block := draw(size)) == size:
            first += block[: world - len(first)] if len(first) < world else []
            if pending:
                yield pending
            position += size
            pending = RankBatch(block[rank::world], position, False, False, snapshot and snapshot(index))
            index += 1
            if not merges_tail:
                yield pending
                pending = None
        end = position + len(block)
        block = [] if self.drop_last else self._complete_last(block, first)
        local = block[rank::world]
        if pending and 0 < len(block) < world:
            yield RankBatch(pending.items + local, end, False, True, snapshot and snapshot(index - 1))
            return
        if pending:
            yield pending
        if local:
            yield RankBatch(local, end, len(block) < world, True, snapshot and snapshot(index))

    def _complete_last(self, block: list[Any], first: list[Any]) -> list[Any]:
        """Return the last, incomplete global batch after applying `uneven`."""
        world = self.shard.world
        remainder = len(block) % world
        if remainder == 0 or self.uneven == "exact":
            return block
        self.check_even(remainder)  # again: a sampler may have no length, or a wrong one
        if self.uneven == "drop":
            return block[:-remainder]
        source = first or block
        return block + (source * (world // len(source) + 1))[: world - remainder]

    def check_even(self, items: int) -> None:
        """Raise under "error" if the number of items does not divide by ranks.

        Raises:
            ConfigurationError: There is a remainder.
        """
        remainder = items % self.shard.world
        if remainder and self.uneven == "error" and not self.drop_last:
            raise ConfigurationError(
                f'uneven="error": the data do not divide by {self.shard.world} ranks, {remainder} are left '
                'over. Write setup_dataloaders(loader, uneven="exact") to use each once, "pad" to repeat '
                'some, or "drop" to skip them.'
            )

    def repeated(self, items: int) -> int:
        """Return how many of the items ranks get a second time."""
        pads = self.uneven == "pad" and not self.drop_last
        return -items % self.shard.world if pads else 0

    def uneven_rows(self, items: int) -> int:
        """Return the items of the last global batch, if shares of it are unequal or repeated; else 0."""
        tail = items % self.size
        if self.batch is None or self.drop_last or self.uneven == "drop" or tail % self.shard.world == 0:
            return 0
        merged = self.uneven == "exact" and tail < self.shard.world and items > tail
        return tail + self.size * merged

    def count(self, items: int) -> int:
        """Return this rank's number of batches for an order of `items` items."""
        rank, world = self.shard
        full, tail = divmod(items, self.size)
        if self.drop_last or tail == 0:
            return full
        if self.uneven == "pad":
            return full + 1
        alone = self.uneven == "exact" and rank < tail and (full == 0 or self.batch is None)
        return full + (tail >= world or alone)


def reject_padding(uneven: str | None, name: str) -> None:
    """Raise if `uneven` is "pad", which needs sharding by Fabric; `name` is the dataset's or loader's.

    Raises:
        ConfigurationError: `uneven` is "pad".
    """
    if uneven == "pad":
        raise ConfigurationError(
            f'uneven="pad" repeats samples, but {name} shards its data itself. Write uneven="drop" to stop '
            'when the first rank has no more, "error" to raise then, or "exact" to use all data of each rank.'
        )
