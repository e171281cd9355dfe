"""The rule that shards items in global order over ranks, for indices and for the samples themselves.

With `world` ranks and `batch` items per rank, global batch k holds positions [k*world*batch,
(k+1)*world*batch) of the order. Rank r takes every world-th position of it, starting at r.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNEVEN = ("pad", "exact", "drop", "error")


class Shard(NamedTuple):
    """Which part of the data this rank takes."""

    rank: int
    world: int


class RankBatch(NamedTuple):
    """One batch of one rank."""

    items: list[Any]
    end: int
    """The position in the global order after this global batch: where a run goes on that has seen it."""
    short: bool
    """Whether some ranks get no batch in this round."""
    last: bool
    """Whether the order has been read to its end."""
    mark: Any
    """What the caller noted when the global batch had been drawn."""


class ShardingRule(NamedTuple):
    """The rule that forms global batches.

    Args:
        share: This rank's part.
        batch: Items per rank. None: items are whole batches, which cannot be split: one per rank and round.
        drop_last: Leave out the last, incomplete global batch.
        uneven: What happens to the last, incomplete global batch where it does not divide by ranks: "pad"
            repeats the first items, "exact" spreads it as evenly as can be (fewer than ranks join the batches
            before), "drop" leaves out what is over, "error" raises.
    """

    share: Shard
    batch: int | None
    drop_last: bool
    uneven: str

    @property
    def size(self) -> int:
        """Items in a global batch."""
        return (self.batch or 1) * self.share.world

    def rank_batches(
        self,
        draw: Callable[[int], list[Any]],
        start: int = 0,
        first: list[Any] | None = None,
        mark: Callable[[int], Any] | None = None,
    ) -> Iterator[RankBatch]:
        """This rank's batches.

        Args:
            draw: Gives the next n items of the order, fewer at its end.
            start: The position of the first of them.
            first: The epoch's first items, up to the number of ranks, where `start` is beyond them.
            mark: Called with the number of each global batch when it has been drawn.

        Raises:
            ConfigurationError: Items are left over under "error".
        """
        (rank, world), size, first = self.share, self.size, list(first or [])
        # Whether the last few items may join the global batch before.
        holds = self.uneven == "exact" and world > 1 and self.batch is not None and not self.drop_last
        held: RankBatch | None = None  # one global batch back, where the last few items may join it
        at, number = start, 0
        while len(block := draw(size)) == size:
            first += block[: world - len(first)] if len(first) < world else []
            if held:
                yield held
            at += size
            held = RankBatch(block[rank::world], at, False, False, mark and mark(number))
            number += 1
            if not holds:
                yield held
                held = None
        end = at + len(block)
        block = [] if self.drop_last else self._evened(block, first)
        mine = block[rank::world]
        if held and 0 < len(block) < world:
            yield RankBatch(held.items + mine, end, False, True, mark and mark(number - 1))
            return
        if held:
            yield held
        if mine:
            yield RankBatch(mine, end, len(block) < world, True, mark and mark(number))

    def _evened(self, block: list[Any], first: list[Any]) -> list[Any]:
        """The last, incomplete global batch as the ranks share it."""
        world = self.share.world
        rest = len(block) % world
        if rest == 0 or self.uneven == "exact":
            return block
        self.check_even(rest)  # only now known where the sampler has no length, or a wrong one
        if self.uneven == "drop":
            return block[:-rest]
        source = first or block
        return block + (source * (world // len(source) + 1))[: world - rest]

    def check_even(self, items: int) -> None:
        """Raise under "error" if so many items do not divide by ranks.

        Raises:
            ConfigurationError: They do not.
        """
        rest = items % self.share.world
        if rest and self.uneven == "error" and not self.drop_last:
            raise ConfigurationError(
                f'uneven="error": the data do not divide by {self.share.world} ranks, {rest} are left over. '
                'Write setup_dataloaders(loader, uneven="exact") to see each once, "pad" to repeat some, '
                '"drop" to leave them out.'
            )

    def count(self, items: int) -> int:
        """This rank's number of batches of so many items."""
        rank, world = self.share
        full, tail = divmod(items, self.size)
        if self.drop_last or tail == 0:
            return full
        if self.uneven == "pad":
            return full + 1
        alone = self.uneven == "exact" and rank < tail and (full == 0 or self.batch is None)
        return full + (tail >= world or alone)


def check_padding(uneven: str | None, name: str) -> None:
    """Raise where `uneven` asks for what only Fabric's own dealing can do.

    Raises:
        ConfigurationError: It is "pad".
    """
    if uneven == "pad":
        raise ConfigurationError(
            f'uneven="pad" repeats samples, and {name} deals out its data itself. Write "drop" to stop with '
            'the rank that ends first, "error" to be told, or "exact" to let each rank see all it has.'
        )
