"""`StateCopies`: detects writes into results of `state_dict()` of a sharded model. Used by `split.py`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from fabric.core.errors import UsageError
from fabric.utilities.init import name_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_KEPT, _KEPT_BYTES = 8, 1 << 20
"""Largest number of tensors of a state that are compared, and their bytes: they stay in memory."""


class StateCopies:
    """The last state dict of each sharded model, to raise if a loop writes its tensors to change parameters.

    `for v, w in zip(average.state_dict().values(), ...): v.lerp_(w, 0.1)` changes a model on one process. The
    state of a sharded model is gathered, so that nothing would change.
    """

    def __init__(self) -> None:
        self._given: weakref.WeakKeyDictionary[Module, list[tuple[str, Tensor, int]]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, module: Module, state: dict[str, Any]) -> None:
        """Keep some tensors of a full state."""
        split = [name for name, p in module.named_parameters() if hasattr(p, "device_mesh")]
        found = [(name, value) for name in split if (value := state.get(name)) is not None]
        whole = [(n, v) for n, v in found if not (v.is_meta or v.is_inference() or hasattr(v, "device_mesh"))]
        smallest = sorted(whole, key=lambda pair: pair[1].nbytes)[:_KEPT]
        while sum([value.nbytes for _, value in smallest]) > _KEPT_BYTES:
            smallest.pop()
        self._given[module] = [(name, value, value._version) for name, value in smallest]

    def drop(self, module: Module) -> None:
        """Drop the state of a model, which was loaded."""
        self._given.pop(module, None)

    def check(self) -> None:
        """Compare the tensors with themselves as they were returned.

        Raises:
            UsageError: One was written, and its model has not changed.
        """
        if not self._given:
            return
        for module, entries in [*self._given.items()]:
            for name, value, version in entries:
                if value._version != version:
                    self.drop(module)
                    raise UsageError(
                        f"{name} of a state_dict() of {name_of(module)} was written. The model is split over "
                        "ranks, so state_dict() returned copies, and the model has not changed. Write "
                        "model.load_state_dict(state) after the writes, or change its parameters: for p, q "
                        "in zip(average.parameters(), model.parameters()): p.lerp_(q, 0.1)."
                    )
