"""Which blocks go to which stage: by what they cost in time, or by their parameters."""

from __future__ import annotations

import copy
import itertools
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.core.errors import UsageError
from fabric.core.messages import say
from fabric.core.tree import flatten, iter_paths, map_tree, unflatten
from fabric.plugins.collectives.objects import broadcast_tree
from fabric.strategies.layouts.parts import CallParts
from fabric.strategies.layouts.pipeline.cut import LISTED
from fabric.strategies.layouts.pipeline.stage import own
from fabric.strategies.layouts.trial import difference
from fabric.utilities.apply_func import move_data_to_device
from fabric.utilities.dtypes import CastTo
from fabric.utilities.init import has_meta_parameters
from fabric.utilities.random_stream import fork_rng

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

    from fabric.core.precision import DtypePolicy
    from fabric.plugins.collectives.channel import Channel
    from fabric.strategies.layouts.pipeline.cut import Blocks

_TRIES = 3


class Costs(NamedTuple):
    """What each block costs."""

    each: list[float]
    """Seconds of forward and backward of one micro-batch, or elements of parameters."""
    by: str
    """"time" or "parameters"."""
    why: str = ""
    """Why not by time."""


def partition(costs: list[float], stages: int) -> list[int]:
    """Numbers of consecutive blocks such that the dearest stage is as cheap as can be, the others even.

    Args:
        costs: Of each block, as many as stages or more.
        stages: How many parts, each of 1 block or more.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    dearest, _ = _cut(sums, stages, max)
    limit = dearest * (1 + 1e-9)
    _, ends = _cut(sums, stages, partial(_squares, limit))
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def _cut(sums: list[float], stages: int, join: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """The least total of all ways to cut, and where its parts end.

    Args:
        sums: Costs of the first 0, 1, 2 ... blocks.
        stages: How many parts.
        join: (total of the parts before, cost of one more) -> total.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for used in range(1, stages + 1):
        best = {
            end: min(
                [
                    (join(total, sums[end] - sums[start]), [*ends, end])
                    for start, (total, ends) in best.items()
                    if start < end
                ]
            )
            for end in range(used, len(sums) - (stages - used))
        }
    return best[len(sums) - 1]


def _squares(limit: float, total: float, cost: float) -> float:
    return total + cost**2 if cost <= limit else float("inf")


def agreed_balance(
    kind: str, measure: Callable[[], tuple[Costs, str]], stages: int, channel: Channel
) -> list[int]:
    """The balance that rank zero finds. All ranks must call this.

    Raises:
        UsageError: The blocks are not what the model's forward does.
    """
    chosen: list[int] = []
    wrong = ""
    if channel.collective.rank == 0:
        costs, wrong = measure()
        chosen = [] if wrong else partition(costs.each, stages)
    chosen, wrong = broadcast_tree((chosen, wrong), 0, channel)
    if wrong:
        raise UsageError(
            f"{LISTED} of {kind} does not list what its forward does: {wrong}. Each block must take what the "
            "one before returned, and the last one return the output."
        )
    if channel.collective.rank == 0 and stages > 1:
        _report(chosen, costs)
    return chosen


def costs_of(
    model: Module,
    blocks: Blocks,
    example: Any,
    count: int,
    checkpointed: bool,
    device: torch.device,
    policy: DtypePolicy,
) -> tuple[Costs, str]:
    """By time where that can be measured, else by parameters; and how far forward is from the blocks.

    Args:
        model: The user's.
        blocks: All blocks.
        example: An input of the model, or a tuple of several; None: there is none.
        count: Micro-batches of one step.
        checkpointed: Whether backward computes the forward again.
        device: Where to measure.
        policy: Of the precision.
    """
    why = "no example_input was given"
    if example is not None:
        why = "parameters have no values yet"
        if not has_meta_parameters(model):
            try:
                wrong = chain_differs(model, blocks, example, device, policy)
                return time_costs(blocks, example, count, checkpointed, device, policy), wrong
            except Exception as error:
                why = f"it does not run on example_input: {type(error).__name__}: {str(error)[:200]}"
    # A block without parameters counts as a little.
    return Costs([sum([p.numel() for p in b.parameters()]) + 1e-3 for _, b in blocks], "parameters", why), ""


def _report(balance: list[int], costs: Costs) -> None:
    ends = list(itertools.accumulate(balance))
    sums = [sum(costs.each[end - size : end]) for size, end in zip(balance, ends, strict=True)]
    unit = (
        [f"{cost * 1e3:.3g} ms" for cost in sums] if costs.by == "time" else [f"{cost:,.0f}" for cost in sums]
    )
    why = f" ({costs.why})" if costs.why else ""
    say(f"pipeline: balance={balance} by {costs.by}{why}; stages: {', '.join(unit)}.")


def time_costs(
    blocks: Blocks, example: Any, count: int, checkpointed: bool, device: torch.device, policy: DtypePolicy
) -> Costs:
    """By seconds of forward and backward on copies of the blocks; random streams stay as they are."""
    args, _ = next(iter(CallParts(as_call(example), {}, count)))
    mixed = torch.autocast(device.type, policy.compute) if policy.autocast else nullcontext()
    each = []
    with fork_rng(device), torch.enable_grad(), mixed:
        value: Any = _cast(move_data_to_device(args, device), policy.param)
        for _, block in blocks:
            tried = copy.deepcopy(block).to(device).train()
            spent, out = [], None
            for _ in range(_TRIES):
                seconds, out = _try(tried, value, checkpointed, device)
                spent.append(seconds)
            each.append(min(spent))
            value = (map_tree(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, out),)
    return Costs(each, "time")


def chain_differs(
    model: Module, blocks: Blocks, example: Any, device: torch.device, policy: DtypePolicy
) -> str:
    """How far the model's own forward is from its blocks one after the other; "": they agree."""
    args = _cast(move_data_to_device(as_call(example), device), policy.param)
    tried = copy.deepcopy(model).to(device).eval()
    with torch.no_grad(), fork_rng(device):
        expected = tried(*args)
        out: Any = None
        for place, (path, _) in enumerate(blocks):
            block = tried.get_submodule(path)
            out = block(*args) if place == 0 else block(out)
    (ours, spec), (theirs, other) = flatten(out), flatten(expected)
    if spec != other:
        return f"forward returns a {type(expected).__name__}, the last block a {type(out).__name__}"
    for (path, _), one, two in zip(iter_paths(expected), theirs, ours, strict=True):
        if difference([one], [two]):
            return f"forward and blocks give different values{f' at output{path}' if path else ''}"
    return ""


def as_call(example: Any) -> tuple[Any, ...]:
    """The positional arguments that an example stands for."""
    return example if type(example) is tuple else (example,)


def _try(block: Module, args: Any, checkpointed: bool, device: torch.device) -> tuple[float, Any]:
    leaves, spec = flatten(args)
    fresh = unflatten(
        [
            leaf.detach().requires_grad_(leaf.is_floating_point()) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ],
        spec,
        args,
    )
    _wait(device)
    start = time.perf_counter()
    out = block(*own(fresh))
    _wait(device)
    middle = time.perf_counter()
    wanted = [leaf for leaf in flatten(out)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(leaf) for leaf in wanted])
    _wait(device)
    spent = time.perf_counter() - start + (middle - start) * checkpointed
    block.zero_grad()
    return spent, out


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    return tree if dtype is None else CastTo(dtype)(tree)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
