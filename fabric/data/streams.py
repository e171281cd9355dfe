"""Streams of indices and of batches, and the part of each that one rank takes. Knows samplers, not loaders.

The order of samples is a function of (seed, epoch) and the user's sampler alone. With `world` ranks and
`batch` samples per rank, global batch k holds positions [k*world*batch, (k+1)*world*batch) of that order, and
rank r takes every world-th position of it, starting at r: one rank with the joined batch size sees the same
global batches.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.data.order import SeededOrder

UNEVEN = ("pad", "exact", "drop", "error")


class Share(NamedTuple):
    """Which part of the data this rank takes."""

    rank: int
    world: int


class ShardedStream:
    """This rank's items of a stream dealt out as it is: whole batches, or indices under batch_size=None.

    What it does not have itself is read from and written to the user's sampler, which is never copied.

    Args:
        order: The items of one epoch.
        share: This rank's part: every world-th item.
        uneven: What happens to items left over after the last full round: "pad" repeats the first ones until
            ranks are equal, "exact" gives one more to the first ranks, "drop" leaves them out, "error"
            raises.
    """

    _OWN = frozenset({"order", "share", "uneven"})

    def __init__(self, order: SeededOrder, share: Share, uneven: str) -> None:
        self.order = order
        self.share = share
        self.uneven = uneven

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration; told to the user's sampler too."""
        self.order.set_epoch(epoch)

    def check_even(self) -> None:
        """Under uneven="error", raise before the first item, where the length is known.

        Raises:
            ConfigurationError: The items cannot be dealt out evenly.
        """
        if self.uneven == "error" and (rest := self._left_over()):
            raise ConfigurationError(_uneven_message(rest, self.share.world))

    def __iter__(self) -> Iterator[Any]:
        # No generator function: the epoch is that of this moment, and errors come now.
        self.check_even()
        return self._deal(iter(self.order))

    def _deal(self, stream: Iterator[Any]) -> Iterator[Any]:
        rank, world = self.share
        first: list[Any] = []
        while len(block := list(islice(stream, world))) == world:
            first = first or block
            yield block[rank]
        block = self._evened(block, first)
        if rank < len(block):
            yield block[rank]

    def _evened(self, block: list[Any], first: list[Any]) -> list[Any]:
        """The last, incomplete round of items as the ranks share it."""
        world = self.share.world
        rest = len(block) % world
        if rest == 0 or self.uneven == "exact":
            return block
        if self.uneven == "error":  # only now known: the sampler has no length, or a wrong one
            raise ConfigurationError(_uneven_message(rest, world))
        if self.uneven == "drop":
            return block[:-rest]
        return block + _cycle(first or block, world - rest)

    def _left_over(self) -> int:
        try:
            return len(self.order) % self.share.world
        except TypeError:
            return 0

    def __len__(self) -> int:
        rank, world = self.share
        full, tail = divmod(len(self.order), world)
        if self.uneven == "exact":
            return full + (rank < tail)
        return full + (tail > 0 and self.uneven == "pad")

    def __getattr__(self, name: str) -> Any:
        # Dunder names belong to protocols (pickle, copy) that must not reach the user's object through this
        # one.
        if name in self._OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.order.sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.order.sampler, name, value)


class ShardedBatches(ShardedStream):
    """This rank's batches of indices: what stands in place of a loader's BatchSampler.

    Args:
        order: The indices of one epoch.
        batch_size: Samples per rank.
        drop_last: Leave out the last, incomplete global batch.
        share: This rank's part.
        uneven: What happens to the last, incomplete global batch where it does not divide by ranks: "pad"
            repeats the first samples, "exact" spreads it as evenly as can be (fewer than ranks join the
            batches before), "drop" leaves out what is over, "error" raises.
    """

    _OWN = ShardedStream._OWN | {"batch_size", "drop_last"}

    def __init__(
        self, order: SeededOrder, batch_size: int, drop_last: bool, share: Share, uneven: str
    ) -> None:
        super().__init__(order, share, uneven)
        self.batch_size = batch_size
        self.drop_last = drop_last

    @property
    def sampler(self) -> Any:
        """The user's sampler."""
        return self.order.sampler

    def _deal(self, stream: Iterator[Any]) -> Iterator[list[Any]]:
        rank, world = self.share
        size = self.batch_size * world
        first: list[Any] = []
        held: list[Any] = []  # one global batch back, since the last few samples may join it
        while len(block := list(islice(stream, size))) == size:
            first = first or block
            if held:
                yield held
            held = block[rank::world]
        block = [] if self.drop_last else self._evened(block, first)
        mine = block[rank::world]
        if len(block) < world:
            mine = held + mine
        elif held:
            yield held
        if mine:
            yield mine

    def _left_over(self) -> int:
        return 0 if self.drop_last else super()._left_over()

    def __len__(self) -> int:
        rank, world = self.share
        full, tail = divmod(len(self.order), self.batch_size * world)
        if self.drop_last or tail == 0:
            return full
        if self.uneven == "pad":
            return full + 1
        few = self.uneven == "exact" and full == 0 and rank < tail
        return full + (tail >= world or few)


def _cycle(items: list[Any], count: int) -> list[Any]:
    return (items * (count // len(items) + 1))[:count]


def _uneven_message(rest: int, world: int) -> str:
    return (
        f'uneven="error": the data do not divide by {world} ranks, {rest} are left over. Write '
        f'setup_dataloaders(loader, uneven="exact") to see each once, "pad" to repeat some, '
        f'"drop" to leave them out.'
    )
