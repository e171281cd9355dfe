"""`EpochOrder`: a user's sampler whose draws are equal on all ranks and do not change the global generators.

Also: get, set and seed the global generators of torch, Python and numpy, and generators of the user.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabric.utilities.seed import derive_seed, host_states, loaded_numpy, set_rng_states

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ORDERED = (SequentialSampler, range, list, tuple)
_DRAWS_AT_START = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_GROWTH = 256
_MAX_WRAPPED = 1_000
"""Most items of a container in which samplers are looked for."""


class EpochOrder:
    """The items of an epoch, from a user's sampler or batch sampler, which is never copied or reconstructed.

    Its draws are a function of (seed, epoch), equal on all ranks. During a draw, torch's, Python's and
    numpy's global generators have a private state, so the training loop's random stream is unchanged.
    A sampler that has a generator keeps using it; its state must be equal on all ranks at the start.

    Args:
        sampler: The user's object.
        seed: The base of the order; None: the sampler determines the order, as with plain torch.
        chunk: Number of items of the first draw. Switching the generators costs about 0.3 ms, so
            chunks double with each draw, up to 256-fold.
    """

    def __init__(self, sampler: Iterable[Any], seed: int | None, chunk: int = 1) -> None:
        self.sampler = sampler
        self.seed = seed
        self.chunk = chunk
        self.epoch = 0
        self.states: dict[str, Any] | None = None
        """States of the global generators for the next epoch if `seed` is None; None: the current ones."""

    @property
    def is_sequential(self) -> bool:
        """Whether the order needs no random draws: dataset order, or a list of indices."""
        # Exact types: a subclass may shuffle in its own __iter__.
        return type(self.sampler) in _ORDERED

    def __iter__(self) -> Iterator[Any]:
        return self.stream()

    def stream(self, skip: int = 0, keep: int = 0) -> Iterator[Any]:
        """Return an iterator over the first `keep` skipped items, then all items from index `skip` on."""
        # Not a generator function: the epoch is read now, even if the first item is requested later.
        private, keep = None, min(skip, keep)
        if skip and self.is_sequential:
            items: Any = self.sampler
            items = range(len(items)) if isinstance(items, SequentialSampler) else items
            return chain(items[:keep], items[skip:])  # O(1) skip
        if self.seed is not None and not self.is_sequential:
            private = PrivateRandomness(derive_seed(self.seed, self.epoch))
        elif self.states is not None:
            private = PrivateRandomness(0, self.states)
        if type(self.sampler) is RandomSampler and not self.sampler.replacement:
            return self._draw_items(_random_permutation(self.sampler, skip, keep), private, keep, keep)
        return self._draw_items(self.sampler, private, skip, keep)

    def _draw_items(
        self, items: Iterable[Any], private: PrivateRandomness | None, skip: int, keep: int
    ) -> Iterator[Any]:
        size = self.chunk
        with private or nullcontext():
            stream = iter(items)  # only now: torch calls iter() twice when it starts new workers
            chunk = list(islice(stream, keep))
            next(islice(stream, skip - keep, skip - keep), None)  # skips them
            chunk += _copy_items(islice(stream, size))
        yield from chunk
        if private is None or self.seed is None or type(self.sampler) in _DRAWS_AT_START:
            yield from stream
            return
        while chunk:
            size = min(2 * size, _GROWTH * self.chunk)
            with private:
                chunk = _copy_items(islice(stream, size))
            yield from chunk

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


def _copy_items(items: Iterable[Any]) -> list[Any]:
    """Return the drawn items; batches are copied, since a sampler may reuse one list for all of them."""
    return [item.copy() if type(item) is list else item for item in items]


def _random_permutation(sampler: RandomSampler, skip: int, keep: int) -> Iterator[int]:
    """Yield the first `keep` indices of a RandomSampler and those from `skip` on, without a full list."""
    total, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    # If `total` divides the number of samples, torch draws one permutation more. A user's generator must
    # draw it, too, because its next epoch depends on it.
    for at in range(0, sampler.num_samples + (generator is sampler.generator), total):
        order = torch.randperm(total, generator=generator)[: sampler.num_samples - at]
        for start, end in ((0, keep), (skip, sampler.num_samples)):
            part = order[max(0, start - at) : max(0, end - at)]
            for chunk in part.split(_GROWTH * 16) if len(part) else ():
                yield from chunk.tolist()


def set_epoch_of(part: Any, epoch: int) -> None:
    """Call `set_epoch` of a user's sampler (and of one inside a batch sampler) or dataset."""
    for item in with_set_epoch(part):
        item.set_epoch(epoch)


def epoch_of(part: Any) -> int | None:
    """Return the epoch of a user's sampler (or one inside a batch sampler) or dataset; None: it has none."""
    epochs = [getattr(item, "epoch", getattr(item, "_epoch", None)) for item in with_set_epoch(part)]
    return next((epoch for epoch in epochs if isinstance(epoch, int)), None)


def has_state(part: Any) -> bool:
    """Whether the object has `state_dict()` and `load_state_dict()`, so that it resumes without rereading."""
    return all([callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict")])


def with_set_epoch(part: Any) -> list[Any]:
    """Return those of a user's sampler or dataset, and a sampler inside it, that have `set_epoch`."""
    candidates = (part, getattr(part, "sampler", None))
    return [item for item in candidates if callable(getattr(item, "set_epoch", None))]


class PrivateRandomness:
    """Context in which the host's global generators have a private state, kept from one `with` to the next.

    Args:
        seed: The seed of the first private state.
        states: The first private state, in place of `seed`.
        restores: Whether the outer state is restored at the exit. False in workers, which are seeded for
            every batch.
    """

    def __init__(self, seed: int, states: dict[str, Any] | None = None, restores: bool = True) -> None:
        self._seed = seed
        self._restores = restores
        self.states = states
        """The private state between two uses, for a checkpoint."""
        self._outer: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._outer = host_states() if self._restores else {}
        if self.states is None:
            seed_draws(self._seed)
        else:
            set_rng_states(self.states)

    def __exit__(self, *exc: object) -> None:
        self.states = host_states()
        if self._restores:
            set_rng_states(self._outer)


def seed_draws(seed: int) -> None:
    """Seed this process's host generators for one order or batch; faster than `seed_streams`, no devices."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed ^ 1)
    if (numpy := loaded_numpy()) is not None:
        numpy.random.seed((seed ^ 2) % 2**32)


def generators_of(holders: list[Any], exclude: Any) -> list[Any]:
    """Return torch's, Python's and numpy's generators that are attributes of `holders`, without `exclude`.

    Also those of samplers that are attributes of `holders`, or of these samplers: samplers wrap others, one
    or a list of them.
    """
    generators: dict[int, Any] = {}
    found = {id(holder): holder for holder in holders}
    waiting = list(found.values())
    while waiting:
        holder = waiting.pop(0)
        attributes = [*getattr(holder, "__dict__", {}).values(), getattr(holder, "generator", None)]
        values = [value for attribute in attributes for value in _container_items(attribute)]
        wrapped = {
            id(value): value for value in values if isinstance(value, Sampler) and id(value) not in found
        }
        found.update(wrapped)
        waiting += wrapped.values()
        generators.update(
            {
                id(value): value
                for value in values
                if value is not exclude and generator_state_accessors(value) is not None
            }
        )
    return list(generators.values())


def _container_items(attribute: Any) -> list[Any]:
    """Return the items of a short container, or the attribute itself: long lists are indices."""
    if type(attribute) not in (list, tuple, dict) or len(attribute) > _MAX_WRAPPED:
        return [attribute]
    return [*(attribute.values() if isinstance(attribute, dict) else attribute)]


def generator_state_accessors(value: Any) -> Any:
    """Return (get, set) of a generator's state, in types that safe loading accepts; None: not a generator."""
    if isinstance(value, torch.Generator):
        return value.get_state, lambda state: value.set_state(state.cpu())
    if isinstance(value, random.Random):
        return value.getstate, lambda state: value.setstate((state[0], tuple(state[1]), state[2]))
    numpy = loaded_numpy()
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return lambda: _without_arrays(bits.state), lambda state: setattr(bits, "state", state)
    if isinstance(value, numpy.random.RandomState):
        return lambda: _without_arrays(value.get_state(legacy=False)), value.set_state
    return None


def _without_arrays(state: Any) -> Any:
    """Return the state with lists in place of arrays; numpy accepts both."""
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "dtype") else state
