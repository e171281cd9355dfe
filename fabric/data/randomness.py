"""Random generators: the global ones, which the loop and the data share, and those of the user's own."""

from __future__ import annotations

import random
from typing import Any

import torch

from fabric.utilities.seed import host_states, loaded_numpy, set_rng_states


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
        found.update({id(value): value for value in values if value is not but and _ways(value) is not None})
    return list(found.values())


def state_of(generator: Any) -> Any:
    """Its state, in types that safe loading reads."""
    return _ways(generator)[0]()


def set_state(generator: Any, state: Any) -> None:
    """Put back what `state_of` gave."""
    _ways(generator)[1](state)


def _ways(value: Any) -> Any:
    """(get, set) of a generator object; None for other objects."""
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


class PrivateRandomness:
    """Context in which the host's global generators hold a private state, kept from one `with` to the next.

    Args:
        seed: Of the private state.
        states: The private state, as `states()` gave it, instead.
    """

    def __init__(self, seed: int, states: dict[str, Any] | None = None) -> None:
        self._seed = seed
        self._mine = states
        self._theirs: dict[str, Any] = {}

    def states(self) -> dict[str, Any]:
        """The private state, for a checkpoint; between two uses."""
        if self._mine is None:
            with self:
                pass
        return self._mine or {}

    def __enter__(self) -> None:
        self._theirs = host_states()
        if self._mine is None:
            seed_draws(self._seed)
        else:
            set_rng_states(self._mine)

    def __exit__(self, *exc: object) -> None:
        self._mine = host_states()
        set_rng_states(self._theirs)
