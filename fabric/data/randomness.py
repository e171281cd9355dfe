"""Random generators: the global ones, which the loop and the data share, and those of the user's own."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from fabric.utilities.seed import collect_rng_states, set_rng_states

if TYPE_CHECKING:
    from collections.abc import Callable


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
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
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
    """Context in which the global generators hold a private state, kept from one `with` to the next.

    Args:
        seed: Of the private state.
        states: The private state, as `states()` gave it, instead.
        restores: Whether the state outside is put back; False where nobody goes on with it (in workers, which
            are seeded for every batch).
    """

    def __init__(self, seed: int, states: dict[str, Any] | None = None, restores: bool = True) -> None:
        self._seed = seed
        self._restores = restores
        self._mine: list[Any] | None = None
        self._theirs: list[Any] = []
        if states is not None:
            outer = collect_rng_states()
            set_rng_states(states)
            self._mine = [get() for get, _, _ in _generators()]
            set_rng_states(outer)

    def states(self) -> dict[str, Any]:
        """The private state, for a checkpoint; between two uses."""
        with self:
            return collect_rng_states()

    def __enter__(self) -> None:
        parts = _generators()
        self._theirs = [get() for get, _, _ in parts] if self._restores else []
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
