"""Points at which a model can be cut: blocks in forward order, the tensors they share, and their stages.

Changes nothing. All ranks compute the same without communication.
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
    from collections.abc import Iterable

    from torch import Tensor

LISTED = "pipeline_blocks"
"""The method by which a module lists its blocks."""

Blocks = list[tuple[str, Module]]
"""(path in the model, block)."""


def find_blocks(model: Module) -> Blocks:
    """The blocks of a model: forward(x) is that of the first one, and each goes on with what the last
    returned.

    Raises:
        ConfigurationError: The model is no Sequential and lists no blocks, or parameters are in none of them.
        ArgumentTypeError: What it lists are no modules of its own.
        UsageError: Something would be lost when blocks are called one by one.
    """
    kind = type(model).__name__
    if hasattr(model, LISTED):
        blocks = list(getattr(model, LISTED)())
    elif isinstance(model, Sequential) and type(model).forward is Sequential.forward:
        blocks = list(model)
    else:
        raise ConfigurationError(
            f"A pipeline is cut between blocks, and {kind} is neither an nn.Sequential nor does it list its "
            "blocks. Build it as nn.Sequential(embedding, *layers, head), or give it a method "
            f"`def {LISTED}(self): return [self.embedding, *self.layers, self.head]`: modules of which each "
            "takes what the one before returned."
        )
    paths = {id(module): path for path, module in model.named_modules()}
    for place, block in enumerate(blocks):
        if not isinstance(block, Module) or id(block) not in paths or block is model:
            what = f"a {type(block).__name__}" if not isinstance(block, Module) else "no part of the model"
            raise ArgumentTypeError(
                f"Block {place} of {kind} is {what}. {LISTED} must list modules that are attributes of it "
                "(or of its children): a stage holds whole modules."
            )
    found = [(paths[id(block)], block) for block in blocks]
    _check(model, found)
    return found


def _check(model: Module, blocks: Blocks) -> None:
    kind = type(model).__name__
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    outside = [name for name, p in model.named_parameters() if id(p) not in inside]
    if outside:
        raise ConfigurationError(
            f"{', '.join(outside[:4])}{', ...' if outside[4:] else ''} of {kind} are in none of its blocks, "
            "so no stage would hold them. Move each into the block that uses it, or list its module in "
            f"{LISTED}."
        )
    if any([hasattr(p, "device_mesh") for p in model.parameters()]):
        raise UsageError(f"{kind} has parameters that are split over ranks (DTensor). Set up a plain model.")
    if has_forward_hooks(model) or has_module_backward_hooks(model):
        raise UsageError(
            f"{kind} has forward or backward hooks of its own, which would never run: a pipeline calls its "
            "blocks one by one. Register them on blocks."
        )


Shared = dict[int, str]
"""A tensor that several stages use (tied weights): those stages, each with one of its paths in the model."""


def shared_parameters(blocks: Blocks, stage_of: list[int]) -> list[Shared]:
    """The parameters that several stages use.

    Args:
        blocks: All blocks.
        stage_of: Of each block.

    Raises:
        UsageError: Stages share a buffer, which each of them would change by itself.
    """
    for buffer in _shared([(path, b.named_buffers(remove_duplicate=False)) for path, b in blocks], stage_of):
        raise UsageError(
            f"{' and '.join(buffer.values())} are one buffer, used by stages "
            f"{' and '.join(map(str, buffer))}: each would change it by itself. Give each block its "
            "own, or choose balance= so that one stage has all of them."
        )
    return _shared([(path, b.named_parameters(remove_duplicate=False)) for path, b in blocks], stage_of)


def _shared(named: list[tuple[str, Iterable[tuple[str, Tensor]]]], stage_of: list[int]) -> list[Shared]:
    found: dict[int, Shared] = {}
    for (path, tensors), stage in zip(named, stage_of, strict=True):
        for name, tensor in tensors:
            found.setdefault(id(tensor), {}).setdefault(stage, f"{path}.{name}")
    return [shared for shared in found.values() if len(shared) > 1]


def checked_balance(balance: Any, stages: int | None = None) -> list[int] | None:
    """The numbers of blocks of each stage; None: "auto".

    Raises:
        ConfigurationError: Numbers below 1, or another number of stages.
        ArgumentTypeError: Neither "auto" nor a list of whole numbers.
    """
    if balance == "auto":
        return None
    if not isinstance(balance, list | tuple) or not balance:
        raise ArgumentTypeError(
            f'balance={balance!r} must be "auto" or a list with the number of blocks of each stage: [2, 3, '
            "3]."
        )
    for place, blocks in enumerate(balance):
        check_number(f"balance[{place}]", blocks)
    if stages is not None and len(balance) != stages:
        raise ConfigurationError(f"balance={list(balance)} is for {len(balance)} stages, not {stages}.")
    return list(balance)


def check_fits(balance: list[int] | None, stages: int, blocks: Blocks, kind: str) -> None:
    """Raise unless every stage gets a block, and every block a stage.

    Raises:
        ConfigurationError: There are fewer blocks than stages, or not as many as the balance has.
    """
    if len(blocks) < stages or (balance is not None and sum(balance) != len(blocks)):
        paths = ", ".join([path for path, _ in blocks[:6]])
        raise ConfigurationError(
            f"{kind} has {len(blocks)} blocks ({paths}{', ...' if blocks[6:] else ''}), which cannot be put "
            f"on {stages} stages{f' by balance={balance}' if balance else ''}. Write numbers that sum to "
            f"{len(blocks)}, use {len(blocks)} devices or fewer, or num_stages={max(len(blocks), 1)} (the "
            "other ranks see different data)."
        )


def even_balance(blocks: Blocks, stages: int, tell: bool) -> list[int]:
    """Return the number of blocks of each stage, so that the parameters are spread evenly.

    Args:
        blocks: All blocks, as many as stages or more.
        stages: How many there are.
        tell: Whether this rank says what was chosen.
    """
    # A block without parameters counts as a little.
    costs = [sum([p.numel() for p in block.parameters()]) + 1e-3 for _, block in blocks]
    balance = partition(costs, stages)
    if tell and stages > 1:
        ends = itertools.accumulate(balance)
        sums = [f"{sum(costs[end - size : end]):,.0f}" for size, end in zip(balance, ends, strict=True)]
        print_line(f"pipeline: balance={balance}; parameters of the stages: {', '.join(sums)}.")
    return balance


def partition(costs: list[float], stages: int) -> list[int]:
    """Numbers of consecutive blocks such that the dearest stage is as cheap as can be, the others even.

    Args:
        costs: Of each block, as many as stages or more.
        stages: How many parts, each of 1 block or more.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    # Of the first blocks, by their number: the dearest part, the sum of squares, where the parts end.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for used in range(1, stages + 1):
        best = {
            end: min(
                [
                    (max(dearest, cost := sums[end] - sums[start]), squares + cost**2, [*ends, end])
                    for start, (dearest, squares, ends) in best.items()
                    if start < end
                ]
            )
            for end in range(used, len(sums) - (stages - used))
        }
    return [end - start for start, end in itertools.pairwise([0, *best[len(costs)][2]])]
