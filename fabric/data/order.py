"""`SeededOrder`: a sampler whose draws are equal on all ranks and leave the training loop's streams alone."""

from __future__ import annotations

import random
import sys
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from fabric.utilities.seed import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_ORDERED = (SequentialSampler, range, list, tuple)
_DRAWS_AT_START = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_GROWTH = 256
_WORKERS = 1  # salt: the workers' streams are not the order's


class SeededOrder:
    """A user's sampler (or batch sampler) whose draws are a function of (seed, epoch), equal on all ranks.

    The sampler draws from torch's, Python's and numpy's global generators; while it is asked for its next
    items these hold a private state, so the training loop's own random stream is untouched. A sampler with a
    generator of its own keeps using that; it must start equal on all ranks.

    Args:
        sampler: The user's object; never copied, its constructor never run.
        seed: The base of the order.
        chunk: How many items to draw at a time, at first. Changing over the generators costs some 0.3 ms, so
            chunks grow with what has been used, up to 256-fold.
        workers: The loader's generator, from which its workers are seeded; follows the epoch. None: it is the
            user's.
    """

    def __init__(
        self, sampler: Iterable[Any], seed: int, chunk: int, workers: torch.Generator | None = None
    ) -> None:
        self.sampler = sampler
        self.seed = seed
        self.chunk = chunk
        self.workers = workers
        self.epoch = 0

    @property
    def is_sequential(self) -> bool:
        """Whether nothing is drawn: dataset order, or a list of indices."""
        # Exact types: a subclass may shuffle in its own __iter__.
        return type(self.sampler) in _ORDERED

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration; told to the user's sampler, and to one inside a batch sampler."""
        self.epoch = epoch
        if self.workers is not None:
            seed_worker_generator(self.workers, self.seed, epoch)
        for sampler in (self.sampler, getattr(self.sampler, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        # No generator function: the epoch is that of this moment, also if the first item is asked for much
        # later.
        if self.is_sequential:
            return iter(self.sampler)
        return self._drawn(_PrivateRandomness(derive_seed(self.seed, self.epoch)))

    def _drawn(self, private: _PrivateRandomness) -> Iterator[Any]:
        with private:
            stream = iter(self.sampler)
            items = list(islice(stream, self.chunk))
        yield from items
        if type(self.sampler) in _DRAWS_AT_START:
            yield from stream
            return
        size = self.chunk
        while len(items) == size:
            size = min(2 * size, _GROWTH * self.chunk)
            with private:
                items = list(islice(stream, size))
            yield from items

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


def seed_worker_generator(generator: torch.Generator, seed: int, epoch: int) -> None:
    """Let the base seed that a loader draws for its workers be a function of (seed, epoch)."""
    generator.manual_seed(derive_seed(seed, epoch, _WORKERS))


class _PrivateRandomness:
    """Context in which the global generators hold a private state, kept from one `with` to the next."""

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
    """(get, set, seed) of each global generator; numpy, the last, only where it is loaded."""
    parts: list[Any] = [
        (torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
        (random.getstate, random.setstate, random.seed),
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy_random = numpy.random
        parts.append((numpy_random.get_state, numpy_random.set_state, lambda s: numpy_random.seed(s % 2**32)))
    return parts
