"""`RandomStream`: ranks that work on one thing draw alike, and inside of their own parts differently."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fabric.utilities.seed import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        self._generators = [] if place is None else [torch.default_generator]
        if place is not None and device.type == "cuda":
            torch.cuda.init()
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._fresh: list[Tensor] = []
        self.drawn = False
        """Whether this rank, or one that it has heard of, has drawn."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the generators are this rank's."""
        before = [generator.get_state() for generator in self._generators]
        self.drawn = False
        base = zlib.crc32(b"".join([state.numpy().tobytes() for state in before]))
        for number, generator in enumerate(self._generators):
            generator.manual_seed(derive_seed(base, self._place, number) & (2**63 - 1))
        self._fresh = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)

    def look(self) -> bool:
        """Whether anything has been drawn so far, here or where `heard` knows of."""
        if not self.drawn:
            now = [generator.get_state() for generator in self._generators]
            self.drawn = not all(
                [torch.equal(one, other) for one, other in zip(now, self._fresh, strict=True)]
            )
        return self.drawn

    def go_on(self) -> None:
        """After the context: one step, if any rank has drawn."""
        if self.drawn:
            for generator in self._generators:
                torch.rand(1, generator=generator, device=generator.device)
