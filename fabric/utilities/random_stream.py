"""`RandomStream`: different random numbers on ranks that otherwise have equal random states."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.utilities.seed import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor


class RandomStream:
    """A rank's random stream, used as a context; outside of it ranks have equal random states.

    Inside, the stream is a function of `index` and of the global generators, which are restored afterwards.
    If any rank used random numbers, `advance` moves the global generators one step on all ranks.

    Args:
        index: Index of this rank among ranks with equal states; None: it is alone, and uses torch's streams.
        device: Its generator is included, in addition to the host's.
    """

    def __init__(self, index: int | None, device: torch.device) -> None:
        self._index = index or 0
        self._generators: list[Any] = [] if index is None else [torch.default_generator]
        if index is not None and _has_own_generator(device):
            self._generators.append(_DeviceGenerator(device))
        self._initial: list[Tensor] = []
        self.drawn = False
        """Whether this rank, or another one (set by the caller), used random numbers."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the generators have this rank's stream."""
        before = [generator.get_state() for generator in self._generators]
        self.drawn = False
        base = zlib.crc32(b"".join([state.numpy().tobytes() for state in before]))
        for number, generator in enumerate(self._generators):
            generator.manual_seed(derive_seed(base, self._index, number) & (2**63 - 1))
        self._initial = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)

    def update_drawn(self) -> bool:
        """Set and return `drawn`; call it inside the context."""
        if not self.drawn:
            now = [generator.get_state() for generator in self._generators]
            self.drawn = not all(
                [torch.equal(one, other) for one, other in zip(now, self._initial, strict=True)]
            )
        return self.drawn

    def advance(self) -> None:
        """Move the global generators one step if any rank used random numbers; call it after the context."""
        if self.drawn:
            for generator in self._generators:
                torch.rand(1, device=generator.device)


class _DeviceGenerator:
    """The default generator of a device, through `get_rng_state` and `set_rng_state` of its module."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._module = device, torch.get_device_module(device)

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(self.device)
        return state

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self.device)

    def manual_seed(self, seed: int) -> None:
        self.set_state(torch.Generator(self.device).manual_seed(seed).get_state())


def default_generator(device: torch.device) -> Any:
    """Return the default generator of a device, with `get_state` and `set_state`."""
    return torch.default_generator if device.type == "cpu" else _DeviceGenerator(device)


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Context that restores the generators of the host and of `device`."""
    if not _has_own_generator(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _has_own_generator(device: torch.device) -> bool:
    return device.type not in ("cpu", "mps", "meta")  # mps uses the generator of torch.manual_seed
