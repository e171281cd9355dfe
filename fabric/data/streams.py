"""Streams of indices and of batches, and the part of each that one rank takes. Pure of torch.utils.data loaders.

The order of samples is a function of (seed, epoch) and the user's sampler alone. With `world` ranks and `batch` samples
per rank, global batch k holds positions [k*world*batch, (k+1)*world*batch) of that order, and rank r takes every
world-th position of it, starting at r: one rank with the joined batch size sees the same global batches.
"""

from __future__ import annotations

import random
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.core.errors import ConfigurationError
from fabric.utilities.seed import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

UNEVEN = ("pad", "exact", "drop", "error")


class Share(NamedTuple):
    """Which part of the data this rank takes."""

    rank: int
    world: int


class SeededOrder:
    """A user's sampler (or batch sampler) whose random draws are a function of (seed, epoch), on every rank alike.

    The sampler draws from torch's, Python's and numpy's global generators; while it is asked for its next items these
    hold a private state, so the training loop's own random stream is untouched. A sampler with a generator of its own
    keeps using that.

    Args:
        sampler: The user's object; never copied, its constructor never run.
        seed: The base of the order.
        chunk: How many items to draw at a time.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, chunk: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.chunk = chunk
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        draws = isinstance(self.sampler, torch.utils.data.SequentialSampler) or hasattr(
            self.sampler, "__getitem__"
        )
        if draws:
            yield from self.sampler
            return
        private = _PrivateRandomness(derive_seed(self.seed, self.epoch))
        with private:
            stream = iter(self.sampler)
        while True:
            with private:
                items = list(islice(stream, self.chunk))
            yield from items
            if len(items) < self.chunk:
                return


class ShardedBatches:
    """This rank's batches of indices: what stands in place of a loader's BatchSampler.

    Args:
        order: The indices of one epoch.
        batch_size: Samples per rank.
        drop_last: Leave out the last, incomplete global batch.
        share: This rank's part.
        uneven: What happens to the last, incomplete global batch: "pad" repeats the first samples until ranks are
            equal, "exact" spreads them evenly (fewer than ranks join the batches before), "drop" leaves out what does
            not divide, "error" raises.
    """

    def __init__(
        self, order: SeededOrder, batch_size: int, drop_last: bool, share: Share, uneven: str
    ) -> None:
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.share = share
        self.uneven = uneven

    @property
    def sampler(self) -> Any:
        """The user's sampler."""
        return self.order.sampler

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self.order.epoch = epoch
        _set_epoch(self.sampler, epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        rank, world = self.share
        size = self.batch_size * world
        first: list[Any] = []
        held: list[Any] | None = None  # one global batch back, since the last few samples may join it
        stream = iter(self.order)
        while len(block := list(islice(stream, size))) == size:
            first = first or block
            if held is not None:
                yield held
            held = block[rank::world]
        if not self.drop_last:
            held = yield from self._last(block, first or block, held)
        if held is not None:
            yield held

    def _last(self, block: list[Any], first: list[Any], held: list[Any] | None) -> Any:
        """Deal out the last, incomplete global batch; gives what is still to be yielded."""
        rank, world = self.share
        rest = len(block) % world
        if rest and self.uneven == "error":
            raise ConfigurationError(_uneven_message(rest, world))
        if rest and self.uneven == "drop":
            block = block[:-rest]
        if rest and self.uneven == "pad":
            block = block + _cycle(first, world - rest)
        mine = block[rank::world]
        if len(block) < world and held is not None:
            return held + mine
        if held is not None:
            yield held
        return mine or None

    def __len__(self) -> int:
        rank, world = self.share
        total = len(self.order.sampler)  # type: ignore[arg-type]
        full, tail = divmod(total, self.batch_size * world)
        if self.drop_last or tail == 0:
            return full
        if self.uneven == "drop":
            return full + (tail >= world)
        if self.uneven == "pad":
            return full + 1
        return full + (tail >= world or (full == 0 and rank < tail))

    def __getattr__(self, name: str) -> Any:
        if name == "order":
            raise AttributeError(name)
        return getattr(self.order.sampler, name)


class ShardedStream:
    """This rank's items of a stream that is not batched by us: whole batches, or indices under batch_size=None.

    Args:
        order: The items of one epoch.
        share: This rank's part: every world-th item.
        uneven: As in `ShardedBatches`, with items in place of samples.
    """

    def __init__(self, order: SeededOrder, share: Share, uneven: str) -> None:
        self.order = order
        self.share = share
        self.uneven = uneven

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self.order.epoch = epoch
        _set_epoch(self.order.sampler, epoch)

    def __iter__(self) -> Iterator[Any]:
        rank, world = self.share
        first: list[Any] = []
        stream = iter(self.order)
        while len(block := list(islice(stream, world))) == world:
            first = first or block
            yield block[rank]
        rest = len(block)
        if rest and self.uneven == "error":
            raise ConfigurationError(_uneven_message(rest, world))
        if rest and self.uneven == "pad":
            block = block + _cycle(first or block, world - rest)
        if self.uneven != "drop" and rank < len(block):
            yield block[rank]

    def __len__(self) -> int:
        rank, world = self.share
        full, tail = divmod(len(self.order.sampler), world)  # type: ignore[arg-type]
        if self.uneven == "exact":
            return full + (rank < tail)
        return full + (tail > 0 and self.uneven == "pad")

    def __getattr__(self, name: str) -> Any:
        if name == "order":
            raise AttributeError(name)
        return getattr(self.order.sampler, name)


class _PrivateRandomness:
    """Context in which the global generators hold a private state, which lasts from one `with` to the next."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._mine: list[Any] | None = None
        self._theirs: list[Any] = []

    def __enter__(self) -> None:
        parts = _generators()
        self._theirs = [get() for get, _, _ in parts]
        if self._mine is None:
            for _, _, start in parts:
                start(self._seed)
        else:
            for (_, put, _), state in zip(parts, self._mine, strict=False):
                put(state)

    def __exit__(self, *exc: object) -> None:
        parts = _generators()
        self._mine = [get() for get, _, _ in parts]
        for (_, put, _), state in zip(parts, self._theirs, strict=False):
            put(state)


def _generators() -> list[tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]]:
    """(get, set, seed) of each global generator; numpy only where it is loaded."""
    parts: list[Any] = [
        (torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
        (random.getstate, random.setstate, random.seed),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy_random = numpy.random
        parts.append((numpy_random.get_state, numpy_random.set_state, lambda s: numpy_random.seed(s % 2**32)))
    return parts


def _cycle(items: list[Any], count: int) -> list[Any]:
    return (items * (count // len(items) + 1))[:count] if items else []


def _set_epoch(sampler: Any, epoch: int) -> None:
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _uneven_message(rest: int, world: int) -> str:
    return (
        f'uneven="error": the data do not divide by {world} ranks, {rest} are left over. '
        f'Write setup_dataloaders(loader, uneven="exact") to see each once, "pad" to repeat some, "drop" to leave them out.'
    )
