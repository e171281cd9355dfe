"""Protocols and type aliases for objects of users."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

PathLike = str | Path
Filter = dict[str, Callable[[str, Any], bool]]


@runtime_checkable
class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain data and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load `state_dict`, a result of `state_dict()`."""
        ...


@runtime_checkable
class Steppable(Protocol):
    """Anything that can be stepped like an optimizer."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step, after `closure`, which computes the loss; None: the gradients are computed."""
        ...


@runtime_checkable
class Optimizable(Steppable, Protocol):
    """The interface of an optimizer that precision plugins and strategies use."""

    param_groups: list[dict[Any, Any]]
    defaults: dict[Any, Any]
    state: dict[Any, Any]

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain data and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict`, a result of `state_dict()`."""
        ...


ReduceOp = torch.distributed.ReduceOp if torch.distributed.is_available() else object
"""torch's reduce operation, if torch was built with distributed."""
