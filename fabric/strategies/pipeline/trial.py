"""Whether micro-batches give what the batch gives: as far as modules tell, and one row and two rows show.

And `joined`: the outputs of micro-batches as the output of the batch, where that is possible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.collectives.objects import broadcast_tree
from fabric.core._torch import BatchNorm
from fabric.core.errors import UsageError
from fabric.core.tree import flatten, iter_paths, map_tree, unflatten
from fabric.strategies.pipeline._torch import SPECTRAL_NORMS, forward_pre_hooks
from fabric.strategies.pipeline.run import Pass, forwards
from fabric.strategies.trial import distance, rounding, untouched
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from fabric.strategies.data_parallel.parts import MicrobatchArgs
    from fabric.strategies.pipeline.run import Runner


def warn_of_modules(module: Module) -> None:
    """Warn of modules that in training compute from a whole batch, or once for each batch."""
    found = [f"{name} ({type(m).__name__})" for name, m in module.named_modules() if _looks_at_batches(m)]
    if found:
        rank_zero_warn(
            f"{', '.join(found[:4])}{', ...' * bool(found[4:])}: batch norm, spectral norm and "
            "scale_grad_by_freq do in training for each micro-batch what they would do once for the batch, "
            "which gives other numbers. Use something else, or write num_microbatches=1."
        )


def _looks_at_batches(module: Module) -> bool:
    chains = getattr(module, "parametrizations", {}).values()
    parts = [*forward_pre_hooks(module), *[part for chain in chains for part in chain]]
    normed = any([type(part).__name__ in SPECTRAL_NORMS for part in parts])
    return normed or isinstance(module, BatchNorm) or getattr(module, "scale_grad_by_freq", False)


def try_rows(name: str, runner: Runner, parts: MicrobatchArgs, compute: torch.dtype) -> None:
    """Forwards of the first row, twice, and of two rows, in evaluation. Leaves no trace; all ranks.

    An output whose first dimension is not that of the batch cannot be joined, and micro-batches of one size
    would not show it. A tensor that is not one row for each sample, but looks like it, is broadcast over a
    single row, and over no more. What rows do to each other shows in the first one.

    Args:
        name: Of the model.
        runner: This rank's stage and its links.
        parts: The first batch, of two rows or more.
        compute: The dtype of matrix products, by the precision.

    Raises:
        UsageError: Micro-batches cannot stand for the batch; on all ranks.
    """
    calls = [parts.head(1), parts.head(1), parts.head(2)]
    work = Pass([map_tree(_copy, call) for call in calls])  # blocks may change what they are given
    modules = runner.stage.modules
    with torch.no_grad(), runner.random(), untouched(modules, runner.channel.transport.device):
        for module in modules:
            module.training = False
        runner.run(forwards(3), work)
    torch.clear_autocast_cache()  # torch 2.9 would use these casts, which have no gradient, in training
    found = _look(name, work, compute) if runner.stage.is_last else None
    wrong, mixed = broadcast_tree(found, runner.ranks[-1], runner.channel)
    work.failed = work.error = None  # where it does not run on so few rows, nothing is known
    runner.finish(work, "trial")
    if wrong:
        raise UsageError(wrong)
    if mixed:
        rank_zero_warn(
            f"{name}: what a row comes to depends on the other rows of its batch, also in evaluation. "
            "Micro-batches give other numbers than the batch: compute what all rows have a part in after "
            "the model, or write PipelineStrategy(num_microbatches=1)."
        )


def _look(name: str, work: Pass, compute: torch.dtype) -> tuple[str, bool]:
    """On the last stage: what is wrong, and whether rows depend on each other."""
    if len(work.outputs) < 2:
        return "", False
    if work.failed is not None:
        return (
            f"{name} runs on one row of the batch, but not on two ({work.failed.text}). So some tensor "
            "has as many rows as the batch by chance only, and is broadcast over one row: a mask of "
            "positions by positions, say. Keep what belongs to all samples in a buffer of the model, or "
            "give each sample its own (tensor.expand); or write PipelineStrategy(num_microbatches=1)."
        ), False
    one, again, two = work.outputs.values()
    try:
        joined([one, two], [1, 2])
        joined([one, again], [1, 1])
    except UsageError as error:
        return str(error), False
    columns = zip(*[flatten(tree)[0] for tree in (one, again, two)], strict=True)
    floats = [column for column in columns if column[0] is not None and column[0].is_floating_point()]
    return "", any([torch.equal(a, b) and _differ(a, c, compute) for a, b, c in floats])


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _differ(one: Tensor, two: Tensor, compute: torch.dtype) -> bool:
    """Whether the part of the first row is another where there is a second; more than by rounding."""
    return distance(one, two[: len(one)]) > max(1e-3, 3 * rounding(one, compute))


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
