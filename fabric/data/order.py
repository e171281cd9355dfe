"""`SeededOrder`: a sampler whose draws are equal on all ranks and leave the training loop's streams alone."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from fabric.data.randomness import PrivateRandomness
from fabric.utilities.seed import derive_seed, isolate_rng, set_rng_states

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
        tell(self.sampler, epoch)

    def __iter__(self) -> Iterator[Any]:
        return self.stream()

    def stream(self, skip: int = 0, keep: int = 0) -> Iterator[Any]:
        """The items of the epoch from number `skip` on; before them the first `keep` of those skipped."""
        # No generator function: the epoch is that of this moment, also if the first item is asked for later.
        if self.is_sequential:
            if not skip:
                return iter(self.sampler)
            items: Any = self.sampler
            if isinstance(items, SequentialSampler):
                items = range(len(items))
            return chain(items[: min(skip, keep)], items[skip:])  # no walk over what is skipped
        return self._drawn(PrivateRandomness(derive_seed(self.seed, self.epoch)), skip, keep)

    def _drawn(self, private: PrivateRandomness, skip: int, keep: int) -> Iterator[Any]:
        with private:
            if type(self.sampler) is RandomSampler and not self.sampler.replacement:
                stream = items = _permuted(self.sampler, skip, keep)
            else:
                stream = iter(self.sampler)
                items = _from(stream, skip, keep) if skip else stream
            drawn = _copied(islice(items, min(skip, keep) + self.chunk))
        yield from drawn
        if type(self.sampler) in _DRAWS_AT_START:
            yield from stream
            return
        full = len(drawn) == min(skip, keep) + self.chunk
        size = self.chunk
        while full:
            size = min(2 * size, _GROWTH * self.chunk)
            with private:
                drawn = _copied(islice(stream, size))
            full = len(drawn) == size
            yield from drawn

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class UserOrder:
    """A sampler whose order and part are the user's affair. Remembers how to begin an epoch again.

    Args:
        sampler: The user's object, drawn from as torch does.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.begin_with: dict[str, Any] | None = None
        """States of the global generators for the beginning of the next epoch; None: as they are."""

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration; told to the user's sampler, and to one inside a batch sampler."""
        tell(self.sampler, epoch)

    def stream(self, skip: int = 0, keep: int = 0) -> Iterator[Any]:
        """As in SeededOrder."""
        if self.begin_with is None and not skip:
            return iter(self.sampler)
        return self._again(self.begin_with, skip, keep)

    def _again(self, states: dict[str, Any] | None, skip: int, keep: int) -> Iterator[Any]:
        with isolate_rng() if states else nullcontext():
            if states:
                set_rng_states(states)
            stream = _from(iter(self.sampler), skip, keep)
            drawn = list(islice(stream, min(skip, keep) + 1))
        yield from drawn
        yield from stream

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


def _copied(items: Iterable[Any]) -> list[Any]:
    """The items, drawn ahead; batches as they are now, should the sampler use one list for all of them."""
    return [item.copy() if type(item) is list else item for item in items]


def _permuted(sampler: RandomSampler, skip: int, keep: int) -> Iterator[int]:
    """What torch's RandomSampler yields, from `skip` on, after the first `keep`; makes no list of all."""
    total = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    at = 0
    while at < sampler.num_samples:
        order = torch.randperm(total, generator=generator)[: sampler.num_samples - at]
        for start, end in ((0, min(skip, keep)), (skip, sampler.num_samples)):
            part = order[max(0, start - at) : max(0, end - at)]
            for chunk in part.split(_GROWTH * 16) if len(part) else ():
                yield from chunk.tolist()
        at += total
    if sampler.generator is not None and total and sampler.num_samples % total == 0:
        torch.randperm(total, generator=generator)  # torch's does, too: the next epoch depends on it


def tell(part: Any, epoch: int) -> None:
    """Call `set_epoch` of a user's sampler (and of one inside a batch sampler) or dataset."""
    for each in (part, getattr(part, "sampler", None)):
        set_epoch = getattr(each, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def epoch_of(part: Any) -> int | None:
    """The epoch that a user's sampler (or one inside a batch sampler) or dataset was told; None: none."""
    for each in (part, getattr(part, "sampler", None)):
        if callable(getattr(each, "set_epoch", None)):
            epoch = getattr(each, "epoch", getattr(each, "_epoch", None))
            if isinstance(epoch, int):
                return epoch
    return None


def _from(stream: Iterator[Any], skip: int, keep: int) -> Iterator[Any]:
    """The first `keep` of the `skip` items that are left out, then the others. Skips when first asked."""
    kept = min(skip, keep)
    yield from islice(stream, kept)
    yield from islice(stream, skip - kept, None)


def seed_worker_generator(generator: torch.Generator, seed: int, epoch: int) -> None:
    """Let the base seed that a loader draws for its workers be a function of (seed, epoch)."""
    generator.manual_seed(derive_seed(seed, epoch, _WORKERS))
