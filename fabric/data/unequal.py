"""Parts of unequal size that ranks were given by hand: ranks compare numbers of rows once.

The mean over ranks of means over 3 and over 2 rows is not the mean over 5.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.tree import flatten
from fabric.data.loader import dealing
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning

if TYPE_CHECKING:
    from collections.abc import Callable


class FirstCall:
    """The forward of a set-up model until `restore_forward`: notes the rows of its first call in training.

    No hook of the module, which `torch.compile` would trace.
    """

    __slots__ = ("__weakref__", "call", "rows")

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.rows: int | None = None
        """Of the first tensor; 0: there is none, or Fabric deals out the data."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note rows, and run the forward."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and self.rows is None:
            shapes = [getattr(leaf, "shape", ()) for leaf in flatten((args, kwargs))[0]]
            self.rows = 0 if dealing else next((shape[0] for shape in shapes if shape), 0)
        return self.call(*args, **kwargs)


class FirstRows:
    """The rows of one set-up model. Holds it and its forward weakly: a dropped model must end."""

    def __init__(self, wrapped: Any) -> None:
        first = wrapped.__dict__["forward"] = FirstCall(wrapped.__dict__["forward"])
        self._model, self._first = weakref.ref(wrapped), weakref.ref(first)
        self.rows = 0
        """What was noted until `restore_forward`; 0: nothing."""

    def restore_forward(self) -> None:
        """Put back the forward, unless it was compiled: torch would compile the other one anew."""
        model, first = self._model(), self._first()
        if first is not None:
            self.rows = first.rows or 0
            own, plain = {} if model is None else vars(model), first.call
            if first.rows is not None and own.get("forward") is first:
                own["forward"] = plain


def restore_forwards(first: list[FirstRows]) -> None:
    """Put back the forwards of all models."""
    for one in first:
        one.restore_forward()


def compare_rows(first: list[FirstRows], strategy: Any) -> None:
    """Compare the rows of all models after the second synchronised backward or a later one, when it is known
    whether the loop calls `normalize_gradients`; none is left. All ranks must call this.
    """
    mine = [one.rows for one in first]
    for rows in zip(*strategy.all_gather_object(mine, label="replica check of rows"), strict=True):
        _warn_of_unequal([*rows])


def _warn_of_unequal(rows: list[int]) -> None:
    """Warn if ranks had unequal numbers of rows; `rows`: by rank, 0 where it is not known."""
    if len(set(rows)) > 1 and all(rows):
        shown = ", ".join([f"{count} on rank {rank}" for rank, count in enumerate(rows)])
        rank_zero_warn(
            f"Ranks were given unequal numbers of rows: {shown}. Gradients are averaged over ranks, so a row "
            "of a small part counts more. Let fabric.setup_dataloaders(loader) share the data; or sum the "
            "losses of rows, and write fabric.normalize_gradients(model, num_rows) before each step.",
            category=RanksDifferWarning,
        )
