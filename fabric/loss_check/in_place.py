"""Warnings of gradients that pass through tensors that a verb reduced in place.

A backward treats such a tensor as a value of this rank. That is correct for a mean, which DDP averages, if
the losses of all ranks have the same gradient of it. It is also correct for a sum that only reports the loss:
its gradient is a constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core._torch import node_number
from fabric.core.backward_listeners import add_backward_listener
from fabric.core.source import user_line
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def watch_sum(tensor: Tensor, label: str) -> None:
    """Warn if a backward passes through this tensor, into which the sum over ranks is about to be written."""
    line = user_line()
    if tensor.dim():
        tensor.register_hook(lambda grad: _warn(label, line))
    else:
        tensor.register_hook(ReducedNumber(tensor, label, line).warn)


def compare_mean_gradients(by_rank: Sequence[Sequence[tuple[str, str, float, float]]]) -> None:
    """Warn if the gradients of means in place differ between ranks, or only some ranks computed any."""
    longest = max(by_rank, key=len)
    for index, (label, line, *_) in enumerate(longest):
        rows = [found[index][2:] if index < len(found) else (0.0, 0.0) for found in by_rank]
        # The scale of the terms, also if their sum cancels.
        size = max([abs(number) for row in rows for number in row])
        pairs = [pair for row in rows for pair in zip(row, rows[0], strict=True)]
        if any([abs(number - first) > 1e-4 * size for number, first in pairs]):  # False for nan
            _warn(label, line)
            return


class ReducedNumber:
    """A backward listener for a number that was reduced in place: the loss itself, for a log, or a statistic.

    Its hook keeps it alive. If the loss is linear in the number, its gradient is independent of the value.
    """

    def __init__(self, number: Tensor, label: str, line: str) -> None:
        self._node = node_number(number.grad_fn)
        self._label, self._line, self._is_linear = label, line, True
        add_backward_listener(self)

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Determine whether the loss is linear in the number, and run the backward."""
        roots = [*tensors] if isinstance(tensors, list | tuple) else [tensors]
        nodes = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
        self._is_linear = _reaches(nodes, self._node)
        run(tensors, *args, **kwargs)

    def after_nested_pass(self) -> None:
        """Do nothing: a nested pass is a part of the loss."""

    def warn(self, grad: Tensor) -> None:
        """Hook: warn if the gradient depends on the value."""
        if not self._is_linear:
            _warn(self._label, self._line)


def _reaches(nodes: list[Any], number: int) -> bool:
    """Whether a path of the graph leads to the node of this number over no node that is known as non-linear.

    True for a large graph in which the node was not found.
    """
    seen: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node_number(node) in seen:
            continue
        if node_number(node) == number or len(seen) == _MAX_NODES:
            return True
        seen.add(node_number(node))
        kind, after = type(node).__name__, [each for each, _ in node.next_functions]
        product = kind == "MulBackward0" and None not in after
        quotient = kind == "DivBackward0" and after[1] is not None
        if not (product or quotient or kind in _NOT_LINEAR):
            nodes += after
    return False


def reaches_any(roots: list[Any], numbers: set[int]) -> bool:
    """Whether a path of the graph of these tensors leads to a node with one of the numbers, or to a leaf with
    one of them as id.

    True for a large graph in which none was found.
    """
    nodes = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
    seen: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node is None or (number := node_number(node)) in seen:
            continue
        if number in numbers or id(getattr(node, "variable", None)) in numbers or len(seen) == _MAX_NODES:
            return True
        seen.add(number)
        nodes += [each for each, _ in node.next_functions]
    return False


_MAX_NODES = 1000
_NOT_LINEAR = {
    "PowBackward0", "PowBackward1", "SqrtBackward0", "RsqrtBackward0", "LogBackward0", "Log1PBackward0",
    "ExpBackward0", "AbsBackward0", "ReciprocalBackward0", "SigmoidBackward0", "TanhBackward0",
    "ReluBackward0", "SoftplusBackward0", "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0",
}  # fmt: skip


def _warn(label: str, line: str) -> None:
    rank_zero_warn(
        f"A gradient passed through {label} ({line}), which is not differentiable: each rank gets that of "
        "its own part, not that of the result. Write sync_grads=True in this call, or reduce x.detach() if "
        "no gradient is needed.",
        category=RanksDifferWarning,
    )
