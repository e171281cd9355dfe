"""The outputs of micro-batches as the output of the batch: joined along dim 0, where that is possible."""

from __future__ import annotations

from typing import Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten, iter_paths, unflatten


def joined(outputs: list[Any], rows: list[int]) -> Any:
    """One output in place of several; differentiable.

    Args:
        outputs: Of each micro-batch, trees of tensors (and Nones).
        rows: Of each micro-batch.

    Raises:
        UsageError: They differ in structure, or have no rows to join by.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [flatten(output) for output in outputs]
    spec = flat[0][1]
    if any([other != spec for _, other in flat]):
        raise UsageError(
            "The last stage returned other containers for some micro-batches than for others. Return the "
            "same for any rows."
        )
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    paths = [path for path, _ in iter_paths(outputs[0])]
    leaves = [_join(column, rows, path) for column, path in zip(columns, paths, strict=True)]
    return unflatten(leaves, spec, outputs[0])


def _join(column: tuple[Any, ...], rows: list[int], path: str) -> Any:
    """The parts of one leaf, which may have several rows for each of the input."""
    held = [leaf for leaf in column if leaf is not None]
    if not held:
        return None
    sizes = [len(leaf) if leaf is not None and leaf.dim() else -1 for leaf in column]
    even = all(
        [size >= 0 and size * rows[0] == sizes[0] * row for size, row in zip(sizes, rows, strict=True)]
    )
    if len({leaf.shape[1:] for leaf in held}) > 1 or not even:
        where = f" at output{path}" if path else ""
        shapes = ", ".join([str(list(leaf.shape)) if leaf is not None else "None" for leaf in column])
        raise UsageError(
            f"The last stage returned shapes {shapes}{where} for micro-batches of "
            f"{', '.join(map(str, rows))} rows, which cannot be joined along dim 0. Return outputs whose "
            "first dimension is that of the batch (in place of a mean or a sum: a value for each row, which "
            "your loop reduces), or write PipelineStrategy(num_microbatches=1)."
        )
    return torch.cat(held)
