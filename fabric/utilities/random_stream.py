"""`RandomStream`: ranks that work on one thing draw alike, and inside of their own parts differently."""

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
    """The random numbers of one of several ranks that draw alike outside of this.

    What a rank draws inside is a function of its place and of the global generators, which are as before
    afterwards; if any rank has drawn, they go one step on, on all ranks alike.

    Args:
        place: Of the rank; None: it is the only one, and draws as plain torch does.
        device: Whose generators are meant, beside those of the host.
    """

    def __init__(self, place: int | None, device: torch.device) -> None:
        self._place = place or 0
        self._generators: list[Any] = [] if place is None else [torch.default_generator]
        if place is not None and _has_streams(device):
            self._generators.append(_DeviceGenerator(device))
        self.drawn = False
        """Whether anything was drawn inside, once the context has ended; who hears of others adds them."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the generators are this rank's."""
        before = [generator.get_state() for generator in self._generators]
        base = zlib.crc32(b"".join([state.numpy().tobytes() for state in before]))
        for number, generator in enumerate(self._generators):
            generator.manual_seed(derive_seed(base, self._place, number) & (2**63 - 1))
        fresh = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            now = [generator.get_state() for generator in self._generators]
            self.drawn = not all([torch.equal(*pair) for pair in zip(now, fresh, strict=True)])
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)

    def go_on(self) -> None:
        """After the context: one step, if any rank has drawn."""
        if self.drawn:
            for generator in self._generators:
                torch.rand(1, device=generator.device)


class _DeviceGenerator:
    """The default generator of a device, whose module has functions for its state, not always the object."""

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
    """The default generator of a device: has `get_state` and `set_state`."""
    return torch.default_generator if device.type == "cpu" else _DeviceGenerator(device)


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Context after which the generators of the host and of `device` are as before."""
    if not _has_streams(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _has_streams(device: torch.device) -> bool:
    return device.type not in ("cpu", "mps", "meta")  # that of mps is the one that torch.manual_seed knows
