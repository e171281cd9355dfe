"""Checks that the results of micro-batches are those of the batch: by module types, and by a trial forward.

`join_outputs` concatenates the outputs of micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.collectives.objects import broadcast_tree
from fabric.core._torch import BatchNorm
from fabric.core.errors import UsageError
from fabric.core.tree import flatten, iter_paths, map_tree, unflatten
from fabric.strategies.pipeline._torch import SPECTRAL_NORMS, forward_pre_hooks
from fabric.strategies.pipeline.run import PassState, all_forwards
from fabric.strategies.trial import distance, preserve_state, rounding
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from fabric.strategies.data_parallel.parts import MicrobatchArgs
    from fabric.strategies.pipeline.run import Runner


def warn_batch_dependent(module: Module) -> None:
    """Warn of modules whose training mode depends on the whole batch, or acts once per batch."""
    found = [f"{name} ({type(m).__name__})" for name, m in module.named_modules() if _depends_on_batch(m)]
    if found:
        rank_zero_warn(
            f"The model has {', '.join(found[:4])}{', ...' * bool(found[4:])}. Batch norm, spectral norm and "
            "scale_grad_by_freq act in training once per micro-batch in place of once per batch, which gives "
            "different numbers. Use other layers, or write num_microbatches=1."
        )


def _depends_on_batch(module: Module) -> bool:
    lists = getattr(module, "parametrizations", {}).values()
    hooks = [*forward_pre_hooks(module), *[parametrization for one in lists for parametrization in one]]
    has_spectral_norm = any([type(hook).__name__ in SPECTRAL_NORMS for hook in hooks])
    return has_spectral_norm or isinstance(module, BatchNorm) or getattr(module, "scale_grad_by_freq", False)


def try_row_independence(name: str, runner: Runner, batch: MicrobatchArgs, compute: torch.dtype) -> None:
    """Check by a trial that rows are computed independently. Restores buffers, modes and random generators.
    All ranks must call this.

    The trial runs the first row, twice, and the first two rows, in evaluation mode. An output whose first
    dimension is not that of the batch differs in shape. A tensor whose first dimension equals the batch size
    by chance broadcasts with one row and fails with two. If rows depend on each other, the first row differs.

    Args:
        name: Class name of the model.
        runner: This rank's stage and its links.
        batch: The first batch, of two rows or more.
        compute: Dtype of matrix products.

    Raises:
        UsageError: Outputs of micro-batches cannot be concatenated to that of the batch; on all ranks.
    """
    calls = [batch.head(1), batch.head(1), batch.head(2)]
    state = PassState([map_tree(_copy, call) for call in calls])  # blocks may change inputs in place
    modules = runner.stage.modules
    with torch.no_grad(), runner.random(), preserve_state(modules, runner.channel.transport.device):
        for module in modules:
            module.training = False
        runner.run(all_forwards(3), state)
    torch.clear_autocast_cache()  # torch 2.9 would reuse these casts, which have no gradient, in training
    result = _compare_rows(name, state, compute) if runner.stage.is_last else None
    error, dependent = broadcast_tree(result, runner.ranks[-1], runner.channel)
    state.failed = state.error = None  # a model that fails on one row has no result
    runner.finish(state, "trial")
    if error:
        raise UsageError(error)
    if dependent:
        rank_zero_warn(
            f"The output of {name} for one row depends on the other rows of its batch, also in evaluation. "
            "So micro-batches give other numbers than the batch. Compute across rows after the model, or "
            "write PipelineStrategy(num_microbatches=1)."
        )


def _compare_rows(name: str, state: PassState, compute: torch.dtype) -> tuple[str, bool]:
    """Return (error text, whether rows depend on each other); for the last stage."""
    if len(state.outputs) < 2:
        return "", False
    if state.failed is not None:
        return (
            f"{name} runs on one row of the batch, but not on two ({state.failed.text}). A tensor whose "
            "first dimension equals the batch size by chance (an attention mask of positions x positions) "
            "broadcasts with one row only. Keep tensors of all samples in a buffer of the model, expand them "
            "to a row per sample (tensor.expand), or write PipelineStrategy(num_microbatches=1)."
        ), False
    one, again, two = state.outputs.values()
    try:
        join_outputs([one, two], [1, 2])
        join_outputs([one, again], [1, 1])
    except UsageError as error:
        return str(error), False
    columns = zip(*[flatten(tree)[0] for tree in (one, again, two)], strict=True)
    floats = [column for column in columns if column[0] is not None and column[0].is_floating_point()]
    return "", any([torch.equal(a, b) and _differ(a, c, compute) for a, b, c in floats])


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _differ(one: Tensor, two: Tensor, compute: torch.dtype) -> bool:
    """Whether `one`, the output for the first row, differs from that row of `two` by more than rounding."""
    return distance(one, two[: len(one)]) > max(1e-3, 3 * rounding(one, compute))


def join_outputs(outputs: list[Any], rows: list[int]) -> Any:
    """Return the outputs of micro-batches concatenated along dim 0; differentiable.

    Args:
        outputs: Output of each micro-batch: a tree of tensors (and Nones).
        rows: Number of rows of each micro-batch.

    Raises:
        UsageError: They differ in structure, or their sizes of dim 0 are not proportional to `rows`.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [flatten(output) for output in outputs]
    spec = flat[0][1]
    if any([other != spec for _, other in flat]):
        raise UsageError(
            "The last stage returned different containers for different micro-batches, so their outputs "
            "cannot be concatenated. Return the same structure for any number of rows."
        )
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    paths = [path for path, _ in iter_paths(outputs[0])]
    leaves = [_join(column, rows, path) for column, path in zip(columns, paths, strict=True)]
    return unflatten(leaves, spec, outputs[0])


def _join(column: tuple[Any, ...], rows: list[int], path: str) -> Any:
    """Concatenate one leaf of all micro-batches. It may have several rows for each row of the input."""
    tensors = [leaf for leaf in column if leaf is not None]
    if not tensors:
        return None
    sizes = [len(leaf) if leaf is not None and leaf.dim() else -1 for leaf in column]
    proportional = all(
        [size >= 0 and size * rows[0] == sizes[0] * row for size, row in zip(sizes, rows, strict=True)]
    )
    if len({leaf.shape[1:] for leaf in tensors}) > 1 or not proportional:
        where = f" at output{path}" if path else ""
        shapes = ", ".join([str(list(leaf.shape)) if leaf is not None else "None" for leaf in column])
        raise UsageError(
            f"The last stage returned shapes {shapes}{where} for micro-batches of "
            f"{', '.join(map(str, rows))} rows, which cannot be joined along dim 0. Return outputs whose "
            "first dimension is that of the batch (a value per row in place of a mean or a sum, which your "
            "loop computes), or write PipelineStrategy(num_microbatches=1)."
        )
    return torch.cat(tensors)
