"""`Joined`: the outputs of micro-batches as the output of the batch, and its gradients in parts again."""

from __future__ import annotations

from typing import Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten, iter_paths, unflatten


class Joined:
    """One output in place of several: tensors joined along dim 0, without a graph.

    Args:
        outputs: Of each micro-batch, trees of tensors.
        rows: Of each micro-batch.

    Raises:
        UsageError: They differ in structure, or have no rows to join by.
    """

    def __init__(self, outputs: list[Any], rows: list[int]) -> None:
        flat = [flatten(output) for output in outputs]
        spec = flat[0][1]
        for index, (_, other) in enumerate(flat):
            if other != spec:
                raise UsageError(
                    f"The last stage returned {_entries(outputs[0])} for the first micro-batch, but "
                    f"{_entries(outputs[index])} for micro-batch {index + 1}. Return the same containers for "
                    "any rows."
                )
        columns = [list(column) for column in zip(*[leaves for leaves, _ in flat], strict=True)]
        paths = [path for path, _ in iter_paths(outputs[0])]
        self._sizes = [_sizes(column, rows, path) for column, path in zip(columns, paths, strict=True)]
        joined = [_join(column) for column in columns]
        self.tree: Any = unflatten(joined, spec, outputs[0])
        """Leaves require gradients where a part does."""

    def split(self, grads: dict[int, Any]) -> list[list[Any]]:
        """For each micro-batch the gradients of its leaves, from those of the joined leaves by place."""
        parts = len(self._sizes[0]) if self._sizes else 1
        split: list[list[Any]] = [[] for _ in range(parts)]
        for place, sizes in enumerate(self._sizes):
            grad = grads.get(place)
            if grad is None:
                pieces: list[Any] = [None] * parts
            elif parts == 1:
                pieces = [grad]
            else:
                pieces = list(grad.split(sizes))
            for own, piece in zip(split, pieces, strict=True):
                own.append(piece)
        return split


def _join(column: list[Any]) -> Any:
    if column[0] is None:
        return None
    needed = any([leaf.requires_grad for leaf in column])
    with torch.no_grad():
        whole = column[0].detach() if len(column) == 1 else torch.cat([leaf.detach() for leaf in column])
    return whole.requires_grad_(needed)


def _sizes(column: list[Any], rows: list[int], path: str) -> list[int]:
    """First dimensions of each micro-batch's part; an output may have several for each row of the input."""
    first = column[0]
    if len(column) == 1 or first is None:
        return [0] * len(column)
    where = f" at output{path}" if path else ""
    if not first.dim():
        raise UsageError(
            f"The last stage returned one number for each micro-batch{where}, and what it would be for the "
            "whole batch is not known: a mean, a sum? Return a value for each row and reduce it in your "
            "loop, or write PipelineStrategy(num_microbatches=1)."
        )
    alike = all([isinstance(leaf, torch.Tensor) and leaf.shape[1:] == first.shape[1:] for leaf in column])
    sizes = [leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else -1 for leaf in column]
    if not alike or any(
        [there * rows[0] != sizes[0] * here for there, here in zip(sizes, rows, strict=True)]
    ):
        shapes = ", ".join([str(list(leaf.shape)) if leaf is not None else "None" for leaf in column])
        raise UsageError(
            f"The last stage returned shapes {shapes}{where} for micro-batches of "
            f"{', '.join(map(str, rows))} rows, which cannot be joined along dim 0. Return outputs whose "
            "first dimension is that of the batch, or write PipelineStrategy(num_microbatches=1)."
        )
    return sizes


def _entries(output: Any) -> str:
    paths = [path or "one tensor" for path, _ in iter_paths(output)]
    return f"a {type(output).__name__} with {', '.join(paths[:4])}{', ...' if paths[4:] else ''}"
