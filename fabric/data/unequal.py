"""A warning for batches of unequal size on ranks in loops that shard by hand; compares row counts once.

The mean over ranks of means over 3 and over 2 rows is not the mean over 5 rows.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.tree import flatten
from fabric.data.loader import sharded_iterations
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning

if TYPE_CHECKING:
    from collections.abc import Callable


class FirstCall:
    """The forward of a set-up model until `restore_forward`: records the rows of its first training call.

    Not a hook of the module, since `torch.compile` would trace it.
    """

    __slots__ = ("__weakref__", "call", "rows")

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.rows: int | None = None
        """Rows of the first tensor; 0: no tensor, or Fabric shards the data; None: not called yet."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the rows, and run the forward."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and self.rows is None:
            shapes = [getattr(leaf, "shape", ()) for leaf in flatten((args, kwargs))[0]]
            self.rows = 0 if sharded_iterations else next((shape[0] for shape in shapes if shape), 0)
        return self.call(*args, **kwargs)


class FirstRows:
    """The row count of one set-up model, to which it has weak references, so that it can be collected."""

    def __init__(self, wrapped: Any) -> None:
        first = wrapped.__dict__["forward"] = FirstCall(wrapped.__dict__["forward"])
        self._model, self._first = weakref.ref(wrapped), weakref.ref(first)
        self.rows = 0
        """The rows recorded before `restore_forward`; 0: none."""

    def restore_forward(self) -> None:
        """Restore the original forward, unless it was compiled: torch would compile the original again."""
        model, first = self._model(), self._first()
        if first is not None:
            self.rows = first.rows or 0
            attributes, plain = {} if model is None else vars(model), first.call
            if first.rows is not None and attributes.get("forward") is first:
                attributes["forward"] = plain


def restore_forwards(first: list[FirstRows]) -> None:
    """Restore the original forwards of all models."""
    for first_rows in first:
        first_rows.restore_forward()


def compare_rows(first: list[FirstRows], strategy: Any) -> None:
    """Compare the rows of all models over ranks, and warn if they differ. All ranks must call this.

    Called after the second synchronised backward or later. By then a call of `normalize_gradients`, which
    makes the comparison unnecessary, has happened.
    """
    local = [first_rows.rows for first_rows in first]
    for rows in zip(*strategy.all_gather_object(local, label="replica check of rows"), strict=True):
        _warn_of_unequal([*rows])


def _warn_of_unequal(rows: list[int]) -> None:
    """Warn if ranks had unequal numbers of rows; `rows`: in rank order, 0 if unknown."""
    if len(set(rows)) > 1 and all(rows):
        counts = ", ".join([f"{count} on rank {rank}" for rank, count in enumerate(rows)])
        rank_zero_warn(
            f"Ranks were given unequal numbers of rows: {counts}. Gradients are averaged over ranks, so a "
            "row of a smaller batch has more weight. Shard with fabric.setup_dataloaders(loader); or sum the "
            "losses of rows, and write fabric.normalize_gradients(model, num_rows) before each step.",
            category=RanksDifferWarning,
        )


def warn_of_last_batch(rows: int, strategy: Any) -> None:
    """Warn that the last global batch of an epoch, of `rows` rows, did not divide by the ranks."""
    shards = strategy.distributed_sampler_kwargs["num_replicas"]
    rank_zero_warn(
        f"The last batch of this epoch has {rows} rows, which {shards} ranks cannot share equally: some "
        "ranks had a row less, or a row twice (shuffled loaders). So the mean of their losses is not the "
        "mean over the batch, as one process computes it. Write DataLoader(..., drop_last=True), or choose "
        "a batch_size or a dataset that divides. To accept it without this warning, write "
        'fabric.setup_dataloaders(loader, uneven="exact"), or uneven="pad" to repeat rows.',
        category=RanksDifferWarning,
    )
