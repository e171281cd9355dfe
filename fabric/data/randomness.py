"""Random generators: the global ones, which the loop and the data share, and those of the user's own."""

from __future__ import annotations

import random
from typing import Any

import torch

from fabric.utilities.seed import host_states, loaded_numpy, set_rng_states


class OwnGenerators:
    """The generator objects of a loader and of its samplers: torch's, python's and numpy's.

    Args:
        holders: Objects whose attributes are looked at; None among them are passed over.
        but: One that is not the user's.
    """

    def __init__(self, holders: list[Any], but: torch.Generator | None) -> None:
        found: dict[int, Any] = {}
        for holder in holders:
            values = [*getattr(holder, "__dict__", {}).values(), getattr(holder, "generator", None)]
            found.update(
                {id(value): value for value in values if value is not but and _ways(value) is not None}
            )
        self.generators = list(found.values())

    def __len__(self) -> int:
        return len(self.generators)

    def seeds(self) -> list[int]:
        """What torch's generators were seeded with."""
        return [g.initial_seed() % 2**63 for g in self.generators if isinstance(g, torch.Generator)]

    def states(self) -> list[Any]:
        """Their states, in types that safe loading reads."""
        return [_ways(generator)[0]() for generator in self.generators]

    def set_states(self, states: list[Any]) -> None:
        """Put back what `states` gave."""
        for generator, state in zip(self.generators, states, strict=True):
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
        return lambda: _plain(bits.state), lambda state: setattr(bits, "state", _arrays(state, numpy))
    if isinstance(value, numpy.random.RandomState):
        return lambda: _plain(value.get_state(legacy=False)), lambda s: value.set_state(_arrays(s, numpy))
    return None


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return {"array": state.tolist(), "dtype": str(state.dtype)} if hasattr(state, "dtype") else state


def _arrays(state: Any, numpy: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if state.keys() == {"array", "dtype"}:
        return numpy.array(state["array"], dtype=state["dtype"])
    return {key: _arrays(value, numpy) for key, value in state.items()}


class PrivateRandomness:
    """Context in which the host's global generators hold a private state, kept from one `with` to the next.

    Args:
        seed: Of the private state.
        states: The private state, as `states()` gave it, instead.
        restores: Whether the state outside is put back; False where nobody goes on with it (in workers, which
            are seeded for every batch).
    """

    def __init__(self, seed: int, states: dict[str, Any] | None = None, restores: bool = True) -> None:
        self._seed = seed
        self._restores = restores
        self._mine = states
        self._theirs: dict[str, Any] = {}

    def states(self) -> dict[str, Any]:
        """The private state, for a checkpoint; between two uses."""
        if self._mine is None:
            with self:
                pass
        return self._mine or {}

    def __enter__(self) -> None:
        self._theirs = host_states() if self._restores else {}
        if self._mine is not None:
            set_rng_states(self._mine)
            return
        random.seed(self._seed)
        torch.default_generator.manual_seed(self._seed)
        if (numpy := loaded_numpy()) is not None:
            numpy.random.seed(self._seed % 2**32)

    def __exit__(self, *exc: object) -> None:
        self._mine = host_states()
        if self._theirs:
            set_rng_states(self._theirs)
