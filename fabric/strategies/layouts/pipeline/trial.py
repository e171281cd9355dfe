"""Whether micro-batches give what the batch gives: as far as modules tell, and one row and two rows show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.torch_internals import BatchNorm
from fabric.core.tree import flatten, map_tree
from fabric.strategies.layouts.pipeline.joined import joined
from fabric.strategies.layouts.pipeline.link import Failed
from fabric.strategies.layouts.pipeline.run import Pass, forwards
from fabric.strategies.layouts.trial import distance, rounding, untouched
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from fabric.strategies.layouts.parts import CallParts
    from fabric.strategies.layouts.pipeline.run import Runner

_TRIAL = "a trial with one row and with two"


def warn_of_modules(module: Module) -> None:
    """Of what is computed from a whole batch, or once for each, in training."""
    _warn(
        [(name, m) for name, m in module.named_modules() if isinstance(m, BatchNorm)],
        "batch norm in training normalises each micro-batch by itself, which is not what one big batch "
        "gives. Use another norm, or num_microbatches=1.",
    )
    _warn(
        [(name, m) for name, m in module.named_modules() if _has_spectral_norm(m)],
        "spectral norm in training makes a step of power iteration for each micro-batch, where one big "
        "batch makes one. Leave it out, or write num_microbatches=1.",
    )
    _warn(
        [(name, m) for name, m in module.named_modules() if getattr(m, "scale_grad_by_freq", False)],
        "scale_grad_by_freq divides gradients by counts in each micro-batch, which are not those of the "
        "batch. Leave it out, or write num_microbatches=1.",
    )


def _warn(found: list[tuple[str, Module]], text: str) -> None:
    if found:
        names = [f"{name} ({type(module).__name__})" for name, module in found]
        rank_zero_warn(f"{', '.join(names[:4])}{', ...' * bool(names[4:])}: {text}")


def _has_spectral_norm(module: Module) -> bool:
    parts = [*module._forward_pre_hooks.values()]
    for parametrization in getattr(module, "parametrizations", {}).values():
        parts += parametrization
    return any([type(part).__name__ in ("SpectralNorm", "_SpectralNorm") for part in parts])


def try_rows(name: str, runner: Runner, parts: CallParts, compute: torch.dtype) -> Pass:
    """Forwards of the first row, twice, and of two rows, in evaluation. Leaves no trace; all ranks.

    An output whose first dimension is not that of the batch cannot be joined, and micro-batches of one size
    would not show it. A tensor that is not one row for each sample, but looks like it, is broadcast over a
    single row, and over no more. What rows do to each other shows in the first one.

    Args:
        name: Of the model.
        runner: This rank's stage and its links.
        parts: The first batch, of two rows or more.
        compute: The dtype of matrix products, by the precision.

    Returns:
        The pass, to be finished: failed if micro-batches cannot stand for the batch.
    """
    calls = [parts.head(1), parts.head(1), parts.head(2)]
    work = Pass([map_tree(_copy, call) for call in calls])  # blocks may change what they are given
    modules = runner.stage.modules
    with torch.no_grad(), runner.random(), untouched(modules, runner.channel.wire.device):
        for module in modules:
            module.training = False
        runner.run(forwards(3), work)
    mixed = False
    if runner.stage.is_last:
        try:
            mixed = _look(name, work, compute)
        except UsageError as error:
            runner.note(error, work, _TRIAL)
    told = runner.report(work, runner.stage.count - 1, torch.tensor([mixed]))
    if not isinstance(told, Failed):
        if told.item():
            rank_zero_warn(
                f"{name}: what a row comes to depends on the other rows of its batch, also in evaluation. "
                "Micro-batches give other numbers than the batch: compute what all rows have a part in after "
                "the model, or write PipelineStrategy(num_microbatches=1)."
            )
    elif _TRIAL not in told.text:
        work.failed = work.error = None  # it does not run on so few rows: then nothing is known
    elif not runner.stage.is_last:
        work.failed, work.error = told, None  # what the last stage says of it, on the rank that failed too
    return work


def _look(name: str, work: Pass, compute: torch.dtype) -> bool:
    """On the last stage: whether rows depend on each other.

    Raises:
        UsageError: Outputs cannot be joined; or one row runs, and two do not.
    """
    if work.failed is not None:
        if len(work.outputs) == 2:
            raise UsageError(
                f"{name} runs on one row of the batch, but not on two ({work.failed.text}). So some tensor "
                "has as many rows as the batch by chance only, and is broadcast over one row: a mask of "
                "positions by positions, say. Keep what belongs to all samples in a buffer of the model, or "
                "give each sample its own (tensor.expand); or write PipelineStrategy(num_microbatches=1)."
            )
        return False
    one, again, two = [work.outputs[index] for index in range(3)]
    joined([one, two], [1, 2])
    return any(
        [
            isinstance(a, torch.Tensor)
            and a.is_floating_point()
            and torch.equal(a, b)
            and _differ(a, c, compute)
            for a, b, c in zip(*[flatten(tree)[0] for tree in (one, again, two)], strict=True)
        ]
    )


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _differ(one: Tensor, two: Tensor, compute: torch.dtype) -> bool:
    """Whether the part of the first row is another where there is a second; more than by rounding."""
    return distance(one, two[: len(one)]) > max(1e-3, 3 * rounding(one, compute))
