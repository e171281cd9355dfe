"""Pipeline stages of a model: its blocks in forward order, the tensors that stages share, and the balance.

Nothing here modifies the model or communicates: all ranks compute the same result.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.nn import Module, Sequential

from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.core.messages import print_line
from fabric.strategies._torch import has_forward_hooks
from fabric.strategies.pipeline._torch import has_module_backward_hooks
from fabric.strategies.rows import check_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

BLOCKS_METHOD = "pipeline_blocks"
"""Name of the method by which a module lists its blocks."""

Blocks = list[tuple[str, Module]]
"""(path in the model, block)."""


def find_blocks(model: Module) -> Blocks:
    """Return the blocks of a model in forward order. The first is called with the model's arguments, each
    other one with the output of the block before it.

    Raises:
        ConfigurationError: The model is no Sequential and lists no blocks, or a parameter is in no block.
        ArgumentTypeError: A listed block is no submodule of the model.
        UsageError: The model has hooks or DTensors, which a call of each block alone would ignore.
    """
    kind = type(model).__name__
    if not (hasattr(model, BLOCKS_METHOD) or _is_sequential(model)):
        raise ConfigurationError(
            f"{kind} is neither an nn.Sequential nor has it a method {BLOCKS_METHOD}(). A pipeline divides a "
            "list of blocks into stages. Build it as nn.Sequential(embedding, *layers, head), or add "
            f"`def {BLOCKS_METHOD}(self): return [self.embedding, *self.layers, self.head]`: modules of "
            "which each takes the output of the one before it."
        )
    blocks = listed_blocks(model)
    paths = {id(module): path for path, module in model.named_modules()}
    for index, block in enumerate(blocks):
        if not isinstance(block, Module) or id(block) not in paths or block is model:
            what = f"a {type(block).__name__}" if not isinstance(block, Module) else "no submodule of it"
            raise ArgumentTypeError(
                f"Block {index} of {kind} is {what}. A stage holds whole modules. Let {BLOCKS_METHOD}() list "
                "modules that are attributes of the model or of its children."
            )
    found = [(paths[id(block)], block) for block in blocks]
    _check_blocks(model, found)
    return found


def listed_blocks(model: Any) -> list[Any]:
    """Return what `pipeline_blocks()` returns, or the modules of an nn.Sequential."""
    return list(getattr(model, BLOCKS_METHOD)() if hasattr(model, BLOCKS_METHOD) else model)


def _is_sequential(model: Module) -> bool:
    return isinstance(model, Sequential) and type(model).forward is Sequential.forward


def _check_blocks(model: Module, blocks: Blocks) -> None:
    kind = type(model).__name__
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    outside = [name for name, p in model.named_parameters() if id(p) not in inside]
    if outside:
        raise ConfigurationError(
            f"{', '.join(outside[:4])}{', ...' if outside[4:] else ''} of {kind} are in none of its blocks, "
            "so no stage would hold them. Move each into the block that uses it, or list its module in "
            f"{BLOCKS_METHOD}()."
        )
    if any([hasattr(p, "device_mesh") for p in model.parameters()]):
        raise UsageError(
            f"{kind} has parameters that are DTensors. Stages need plain tensors. Pass a model that is not "
            "sharded to fabric.setup."
        )
    if has_forward_hooks(model) or has_module_backward_hooks(model):
        raise UsageError(
            f"{kind} has forward or backward hooks, which would never run: a pipeline calls the blocks, not "
            "the model. Register them on blocks."
        )


SharedTensor = dict[int, str]
"""A tensor that several stages use (tied weights): {stage: one of its paths in the model}."""


def shared_parameters(blocks: Blocks, stage_of: list[int]) -> list[SharedTensor]:
    """Return the parameters that several stages use.

    Args:
        blocks: All blocks.
        stage_of: The stage of each block.

    Raises:
        UsageError: Stages share a buffer; each stage would update its own copy.
    """
    buffers = [block.named_buffers(remove_duplicate=False) for _, block in blocks]
    for buffer in _across_stages(blocks, buffers, stage_of):
        raise UsageError(
            f"{' and '.join(buffer.values())} are one buffer, used by stages "
            f"{' and '.join(map(str, buffer))}. Each stage would update its own copy. Give each block its "
            "own buffer, or choose balance= so that one stage has all of these blocks."
        )
    parameters = [block.named_parameters(remove_duplicate=False) for _, block in blocks]
    return _across_stages(blocks, parameters, stage_of)


def _across_stages(
    blocks: Blocks, tensors_of: Sequence[Iterable[tuple[str, Tensor]]], stage_of: list[int]
) -> list[SharedTensor]:
    found: dict[int, SharedTensor] = {}
    for (path, _), tensors, stage in zip(blocks, tensors_of, stage_of, strict=True):
        for name, tensor in tensors:
            found.setdefault(id(tensor), {}).setdefault(stage, f"{path}.{name}")
    return [shared for shared in found.values() if len(shared) > 1]


def validate_balance(balance: Any, stages: int | None = None) -> list[int] | None:
    """Return the number of blocks of each stage, or None for "auto".

    Raises:
        ConfigurationError: Numbers below 1, or another number of stages.
        ArgumentTypeError: Neither "auto" nor a list of whole numbers.
    """
    if balance == "auto":
        return None
    if not isinstance(balance, list | tuple) or not balance:
        raise ArgumentTypeError(
            f'balance={balance!r} is neither "auto" nor a list of numbers of blocks. Write for example '
            "balance=[2, 3, 3]."
        )
    for stage, blocks in enumerate(balance):
        check_number(f"balance[{stage}]", blocks)
    if stages is not None and len(balance) != stages:
        raise ConfigurationError(
            f"balance={list(balance)} is for {len(balance)} stages, but there are {stages}. Write {stages} "
            "numbers of blocks."
        )
    return list(balance)


def check_fits(balance: list[int] | None, stages: int, blocks: Blocks, kind: str) -> None:
    """Raise unless every stage gets a block and every block gets a stage.

    Raises:
        ConfigurationError: There are fewer blocks than stages, or `balance` sums to another number.
    """
    if len(blocks) < stages or (balance is not None and sum(balance) != len(blocks)):
        paths = ", ".join([path for path, _ in blocks[:6]])
        raise ConfigurationError(
            f"{kind} has {len(blocks)} blocks ({paths}{', ...' if blocks[6:] else ''}), which cannot be put "
            f"on {stages} stages{f' by balance={balance}' if balance else ''}. Write numbers that sum to "
            f"{len(blocks)}, use {len(blocks)} devices or fewer, or num_stages={max(len(blocks), 1)} (the "
            "other ranks read different data)."
        )


def even_balance(blocks: Blocks, stages: int, log: bool) -> list[int]:
    """Return the number of blocks of each stage such that stages have about as many parameters.

    Args:
        blocks: All blocks, as many as stages or more.
        stages: Number of stages.
        log: Whether this rank logs the result.
    """
    # A block without parameters has a small cost, so that ties favour even numbers of blocks.
    costs = [sum([p.numel() for p in block.parameters()]) + 1e-3 for _, block in blocks]
    balance = partition(costs, stages)
    if log and stages > 1:
        ends = itertools.accumulate(balance)
        sums = [f"{sum(costs[end - size : end]):,.0f}" for size, end in zip(balance, ends, strict=True)]
        print_line(f"pipeline: balance={balance}; parameters of the stages: {', '.join(sums)}.")
    return balance


def partition(costs: list[float], stages: int) -> list[int]:
    """Return the number of consecutive blocks per stage that minimises the largest cost of a stage, and among
    those the sum of squared costs.

    Args:
        costs: Cost of each block; at least `stages` entries.
        stages: Number of stages, each of 1 block or more.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    # {number of first blocks: (largest cost of a stage, sum of squared costs, end of each stage)}
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for used in range(1, stages + 1):
        best = {
            end: min(
                [
                    (max(largest, cost := sums[end] - sums[start]), squares + cost**2, [*ends, end])
                    for start, (largest, squares, ends) in best.items()
                    if start < end
                ]
            )
            for end in range(used, len(sums) - (stages - used))
        }
    return [end - start for start, end in itertools.pairwise([0, *best[len(costs)][2]])]
