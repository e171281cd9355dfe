"""Losses that are no mean over rows: a root or a quotient of means, a norm, the largest losses of a batch.

The mean of such losses of parts of a batch is not the loss of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.core._torch import node_number
from fabric.loss_check._torch import numel_of, saved
from fabric.loss_check.terms import REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator


def nonlinear_part(root: Any, outputs: set[int], rows: int) -> str:
    """Return the name of an operation that makes a loss no mean over rows, such as `sqrt of a mean`; "": none
    was found, or one for each row.

    Args:
        root: The node of the graph that computed the loss.
        outputs: Numbers of the nodes of the model's outputs, where the search ends.
        rows: Rows of the model's input.
    """
    if not outputs:
        return ""
    found = [kind for node in _nodes(root, outputs) if (kind := _nonlinear_kind(node, outputs, rows))]
    return found[0] if 0 < len(found) < rows else ""


def _nonlinear_kind(node: Any, outputs: set[int], rows: int) -> str:
    """Return the name of what a node does, if it makes a loss no mean over rows."""
    kind, nexts = type(node).__name__, [each for each, _ in node.next_functions]
    name = kind.removesuffix("Backward0").removesuffix("Backward1").lower()
    if kind in _OF_ROWS and _is_over_rows(node, rows) and _leads_to(node, outputs):
        return _OF_ROWS[kind]
    if kind in _NONLINEAR and numel_of(node) == 1 and saved(node, "exponent") != 1:
        return f"{name} of a mean or sum" if _has_reduction(nexts[0], outputs) else ""
    if kind == "DivBackward0" and numel_of(node) == 1 and _has_reduction(nexts[1], outputs):
        return "a quotient by a mean or sum"
    is_product = kind == "MulBackward0" and numel_of(node) == 1
    if is_product and all([_has_reduction(each, outputs) for each in nexts]):
        return "a product of means or sums"
    return ""


def _is_over_rows(node: Any, rows: int) -> bool:
    """Whether an operation joins all rows: over the first dimension, or over all of them."""
    dim, sizes = saved(node, "dim"), saved(node, "self_sym_sizes")
    if sizes is not None:
        signed = dim - 2**64 if dim > 2**63 else dim  # torch saves -1 as a number without a sign
        return bool(sizes) and signed % len(sizes) == 0 and sizes[0] == rows
    return numel_of(node) == 1


def _has_reduction(node: Any, outputs: set[int]) -> bool:
    """Whether a mean or sum of the model's outputs is a part of what a node computed."""
    found = [each for each in _nodes(node, outputs) if type(each).__name__ in REDUCTIONS]
    return any([numel_of(each) == 1 and _leads_to(each, outputs) for each in found])


def _leads_to(node: Any, outputs: set[int]) -> bool:
    """Whether a node was computed from whole outputs of the model, over operations that are known."""
    return any([node_number(each) in outputs for each in _nodes(node, outputs)])


def _nodes(root: Any, outputs: set[int]) -> Iterator[Any]:
    """Yield the nodes below a node, down to the outputs. Below an operation that selects rows, exchanges them
    between ranks, or is unknown, there are none.
    """
    seen: dict[int, Any] = {}  # with the nodes, whose ids are theirs while there is a reference
    nodes = [root]
    while nodes and len(seen) < _MAX_NODES:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        yield node
        kind = type(node).__name__
        if node_number(node) not in outputs and kind[-1:].isdigit() and kind not in _SELECTING:
            nodes += [each for each, _ in node.next_functions]


_MAX_NODES = 200
_NONLINEAR = {
    "SqrtBackward0", "RsqrtBackward0", "LogBackward0", "Log10Backward0", "Log2Backward0", "Log1PBackward0",
    "ExpBackward0", "PowBackward0", "ReciprocalBackward0", "SigmoidBackward0", "TanhBackward0",
}  # fmt: skip
_OF_ROWS = {
    **dict.fromkeys(("LinalgVectorNormBackward0", "NormBackward0", "NormBackward1"), "a norm"),
    **dict.fromkeys(("VarBackward0", "StdBackward0"), "a variance or standard deviation"),
    **dict.fromkeys(("TopkBackward0", "SortBackward0"), "topk or sort of rows"),
    **dict.fromkeys(
        ("MaxBackward1", "MinBackward1", "AmaxBackward0", "MedianBackward0"), "max or median of rows"
    ),
    "LogsumexpBackward0": "logsumexp of rows",
}
_SELECTING = {
    "SelectBackward0", "SliceBackward0", "IndexBackward0", "UnbindBackward0", "SplitBackward0",
    "SplitWithSizesBackward0", "IndexSelectBackward0", "MaskedSelectBackward0", "GatherBackward0",
    "UnsafeSplitBackward0", "ChunkBackward0", "NarrowBackward0",
}  # fmt: skip
