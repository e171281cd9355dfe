"""`BegunEpochs`: counts the epochs of a dataset for which a loop sets up a new loader in each epoch."""

from __future__ import annotations

import weakref
from typing import Any


class BegunEpochs:
    """Number of the next epoch of each dataset, so that each new loader of a dataset has a new order.

    `for _ in range(3): loader = fabric.setup_dataloaders(DataLoader(data, shuffle=True))` would otherwise
    have the order of epoch 0 three times. The setup of a model resets the numbers, so that each trial begins
    with epoch 0.
    """

    def __init__(self) -> None:
        self.models = self._seen = 0
        """Number of models that were set up."""
        self._next: list[tuple[weakref.ref[Any], int]] = []

    def __reduce__(self) -> Any:
        return BegunEpochs, ()  # copies have their own count

    def _restart(self) -> None:
        if self.models != self._seen:
            self._next, self._seen = [], self.models

    def next_of(self, loader: Any) -> int:
        """Return the number of the first epoch of a new loader."""
        self._restart()
        data = _root(loader)
        return next((epoch for ref, epoch in self._next if ref() is data), 0)

    def record(self, loader: Any, epoch: int) -> None:
        """Record that a loader begins an epoch of training."""
        self._restart()
        if not self._seen:
            return
        data = _root(loader)
        others = [(ref, number) for ref, number in self._next if ref() is not data and ref() is not None]
        try:
            self._next = [*others, (weakref.ref(data), epoch + 1)]
        except TypeError:  # a list
            self._next = others


def _root(loader: Any) -> Any:
    """Return the dataset below subsets, of which a loop makes a new one for each epoch."""
    data: Any = getattr(loader, "dataset", None)
    while type(data).__module__ == "torch.utils.data.dataset" and hasattr(data, "dataset"):
        data = data.dataset
    return data
