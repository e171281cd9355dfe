"""`BegunEpochs`: counts epochs of datasets of which a loop sets up a new loader for each. Used by loaders."""

from __future__ import annotations

import weakref
from typing import Any


class BegunEpochs:
    """Numbers of the next epochs of datasets, so that loaders that are made anew have new orders.

    `for _ in range(3): loader = fabric.setup_dataloaders(DataLoader(data, shuffle=True))` would else have the
    order of epoch 0 three times. Epochs count from the setup of a model on: each trial begins with epoch 0.
    """

    def __init__(self) -> None:
        self._next: list[tuple[weakref.ref[Any], int]] = []
        self._counts = False

    def restart(self) -> None:
        """Begin with epoch 0 again: a model was set up."""
        self._next, self._counts = [], True

    def next_of(self, loader: Any) -> int:
        """Return the number of the first epoch of a new loader."""
        data = _root(loader)
        return next((epoch for ref, epoch in self._next if ref() is data), 0)

    def note(self, loader: Any, epoch: int) -> None:
        """Record that a loader begins an epoch of training."""
        if not self._counts:
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
