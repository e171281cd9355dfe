"""`EpochOrder`: a user's sampler whose draws are equal on all ranks and leave the loop's own streams alone.

Random generators: the global ones, which the loop and the data share, and those of the user's own.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from fabric.utilities.seed import derive_seed, host_states, loaded_numpy, set_rng_states

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ORDERED = (SequentialSampler, range, list, tuple)
_DRAWS_AT_START = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_GROWTH = 256


class EpochOrder:
    """The items of an epoch: a user's sampler, or batch sampler; never copied, its constructor never run.

    Its draws are a function of (seed, epoch), equal on all ranks: it draws from torch's, Python's and numpy's
    global generators. During a draw these hold a private state, so the training loop's own random stream is
    untouched. A sampler with a generator of its own keeps using that; it must
    start equal on all ranks.

    Args:
        sampler: The user's object.
        seed: The base of the order; None: the order is the user's affair, drawn as torch does.
        chunk: How many items to draw at a time, at first. Changing over the generators costs some 0.3 ms, so
            chunks grow with what has been used, up to 256-fold.
    """

    def __init__(self, sampler: Iterable[Any], seed: int | None, chunk: int = 1) -> None:
        self.sampler = sampler
        self.seed = seed
        self.chunk = chunk
        self.epoch = 0
        self.states: dict[str, Any] | None = None
        """Of the global generators where the next epoch of the user's own order begins; None: as they are."""

    @property
    def is_sequential(self) -> bool:
        """Whether nothing is drawn: dataset order, or a list of indices."""
        # Exact types: a subclass may shuffle in its own __iter__.
        return type(self.sampler) in _ORDERED

    def __iter__(self) -> Iterator[Any]:
        return self.stream()

    def stream(self, skip: int = 0, keep: int = 0) -> Iterator[Any]:
        """The items of the epoch from number `skip` on; before them the first `keep` of those skipped."""
        # No generator function: the epoch is that of this moment, also if the first item is asked for later.
        private, keep = None, min(skip, keep)
        if skip and self.is_sequential:
            items: Any = self.sampler
            items = range(len(items)) if isinstance(items, SequentialSampler) else items
            return chain(items[:keep], items[skip:])  # no walk over what is skipped
        if self.seed is not None and not self.is_sequential:
            private = PrivateRandomness(derive_seed(self.seed, self.epoch))
        elif self.states is not None:
            private = PrivateRandomness(0, self.states)
        if type(self.sampler) is RandomSampler and not self.sampler.replacement:
            return self._drawn(_permuted(self.sampler, skip, keep), private, keep, keep)
        return self._drawn(self.sampler, private, skip, keep)

    def _drawn(
        self, items: Iterable[Any], private: PrivateRandomness | None, skip: int, keep: int
    ) -> Iterator[Any]:
        size = self.chunk
        with private or nullcontext():
            stream = iter(items)  # not before: torch asks twice for the iterator of a new group of workers
            drawn = list(islice(stream, keep))
            next(islice(stream, skip - keep, skip - keep), None)  # passes them over
            drawn += _copied(islice(stream, size))
        yield from drawn
        if private is None or self.seed is None or type(self.sampler) in _DRAWS_AT_START:
            yield from stream
            return
        while drawn:
            size = min(2 * size, _GROWTH * self.chunk)
            with private:
                drawn = _copied(islice(stream, size))
            yield from drawn

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


def _copied(items: Iterable[Any]) -> list[Any]:
    """The items, drawn ahead; batches as they are now, should the sampler use one list for all of them."""
    return [item.copy() if type(item) is list else item for item in items]


def _permuted(sampler: RandomSampler, skip: int, keep: int) -> Iterator[int]:
    """Yield the first `keep` indices of a RandomSampler and those from `skip` on; makes no full list."""
    total, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    # Where they come out even torch draws once more: of a user's generator, whose next epoch depends on it.
    for at in range(0, sampler.num_samples + (generator is sampler.generator), total):
        order = torch.randperm(total, generator=generator)[: sampler.num_samples - at]
        for start, end in ((0, keep), (skip, sampler.num_samples)):
            part = order[max(0, start - at) : max(0, end - at)]
            for chunk in part.split(_GROWTH * 16) if len(part) else ():
                yield from chunk.tolist()


def set_epoch_of(part: Any, epoch: int) -> None:
    """Call `set_epoch` of a user's sampler (and of one inside a batch sampler) or dataset."""
    for each in _told(part):
        each.set_epoch(epoch)


def epoch_of(part: Any) -> int | None:
    """The epoch that a user's sampler (or one inside a batch sampler) or dataset was told; None: none."""
    epochs = [getattr(each, "epoch", getattr(each, "_epoch", None)) for each in _told(part)]
    return next((epoch for epoch in epochs if isinstance(epoch, int)), None)


def has_state(part: Any) -> bool:
    """Whether it can say where it is, and go there without reading again."""
    return all([callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict")])


def _told(part: Any) -> list[Any]:
    both = (part, getattr(part, "sampler", None))
    return [each for each in both if callable(getattr(each, "set_epoch", None))]


class PrivateRandomness:
    """Context in which the host's global generators hold a private state, kept from one `with` to the next.

    Args:
        seed: Of the private state.
        states: The private state, as it was between two uses, instead.
        restores: Whether the state outside is put back; False where nobody goes on with it (in workers, which
            are seeded for every batch).
    """

    def __init__(self, seed: int, states: dict[str, Any] | None = None, restores: bool = True) -> None:
        self._seed = seed
        self._restores = restores
        self.states = states
        """The private state, for a checkpoint; between two uses."""
        self._theirs: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._theirs = host_states() if self._restores else {}
        if self.states is None:
            seed_draws(self._seed)
        else:
            set_rng_states(self.states)

    def __exit__(self, *exc: object) -> None:
        self.states = host_states()
        if self._restores:
            set_rng_states(self._theirs)


def seed_draws(seed: int) -> None:
    """Seed this process's streams for one order or batch; quicker than `seed_streams`, for the host only."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed ^ 1)
    if (numpy := loaded_numpy()) is not None:
        numpy.random.seed((seed ^ 2) % 2**32)


def generators_of(holders: list[Any], but: Any) -> list[Any]:
    """The generators, torch's, python's and numpy's, that are attributes of `holders`; not `but`."""
    found: dict[int, Any] = {}
    for holder in holders:
        values = [*getattr(holder, "__dict__", {}).values(), getattr(holder, "generator", None)]
        found.update(
            {
                id(value): value
                for value in values
                if value is not but and generator_state_accessors(value) is not None
            }
        )
    return list(found.values())


def generator_state_accessors(value: Any) -> Any:
    """(get, set) of the state of a generator object, in types that safe loading reads; None for others."""
    if isinstance(value, torch.Generator):
        return value.get_state, lambda state: value.set_state(state.cpu())
    if isinstance(value, random.Random):
        return value.getstate, lambda state: value.setstate((state[0], tuple(state[1]), state[2]))
    numpy = loaded_numpy()
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return lambda: _plain(bits.state), lambda state: setattr(bits, "state", state)
    if isinstance(value, numpy.random.RandomState):
        return lambda: _plain(value.get_state(legacy=False)), value.set_state
    return None


def _plain(state: Any) -> Any:
    """Lists in place of arrays, which numpy takes as well."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "dtype") else state
