"""Losses that are no mean over rows: a root or a quotient of means, a norm, products of rows with other rows.

The mean of such losses of parts of a batch is not the loss of the batch.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from fabric.core._torch import node_number
from fabric.loss_check._torch import saved
from fabric.loss_check.row_dims import JOINED, RowDims

if TYPE_CHECKING:
    from fabric.loss_check.row_dims import Operation

ROWS_WITH_ROWS = "products or differences of rows with other rows"


def nonlinear_part(root: Any, outputs: set[int], rows: int, has_views: bool) -> str:
    """Return the name of an operation that makes a loss no mean over rows, such as `sqrt of a mean`; "": none
    was found, or one for each row.

    Args:
        root: The node of the graph that computed the loss.
        outputs: Numbers of the nodes of the model's outputs, where the search ends.
        rows: Rows of the batch.
        has_views: Whether outputs may have other rows, so that only operations between rows count.
    """
    found: Counter[str] = Counter()
    dims = RowDims(lambda node: node_number(node) in outputs, rows, lambda done: found.update([_kind(done)]))
    dims.dim_of(root)
    if has_views or found[ROWS_WITH_ROWS]:
        return ROWS_WITH_ROWS if found[ROWS_WITH_ROWS] else ""
    # A loop over rows, which masks each, has an operation for each.
    return next((kind for kind, count in found.items() if kind and count < rows), "")


def _kind(done: Operation) -> str:
    """Return the name of an operation, if it makes a loss no mean over rows."""
    if _is_between_rows(done):
        return ROWS_WITH_ROWS
    if JOINED in done.known:
        return _kind_of_joined(done)
    return _OF_ROWS[done.name] if done.name in _OF_ROWS and done.acts_on_rows() else ""


def _kind_of_joined(done: Operation) -> str:
    """Return the name of an operation on a sum or mean over rows, if it is not linear in it."""
    if done.name == "Div" and done.dims[1] == JOINED:
        return "a quotient by a mean or sum"
    if done.name in _PRODUCTS and None not in done.dims[-2:]:
        return "a product with a mean or sum"
    if done.name in _NONLINEAR and saved(done.node, "exponent") != 1:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", done.name).lower()
        return f"{words} of a mean or sum"
    return ""


def _is_between_rows(done: Operation) -> bool:
    """Whether an operation computes something for pairs of rows, or a sum over rows of products."""
    rows = [dim for dim in done.known if dim != JOINED]
    if done.name == "Pdist":
        return True
    if len(rows) < 2:
        return False
    if done.name in ("Mm", "Addmm"):
        return None not in done.dims[-2:]
    if done.name in ("Bmm", "Baddbmm", "Cdist"):
        return None not in done.dims[-2:] and {*rows} != {-3}
    return done.name in _ELEMENTWISE and len({*rows}) > 1


_PRODUCTS = {"Mul", "Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Dot"}
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Maximum", "Minimum", "Pow", "Logaddexp", "Where"}
_OF_ROWS = {
    **dict.fromkeys(("LinalgVectorNorm", "Norm"), "a norm"),
    **dict.fromkeys(("Var", "Std", "VarMean", "StdMean"), "a variance or standard deviation"),
    **dict.fromkeys(("Topk", "Sort", "Kthvalue"), "topk or sort of rows"),
    **dict.fromkeys(
        ("Max", "Min", "Amax", "Amin", "Aminmax", "Median", "Nanmedian"), "max or median of rows"
    ),
    **dict.fromkeys(("Softmax", "LogSoftmax"), "softmax over rows"),
    "Logsumexp": "logsumexp of rows",
    "Logcumsumexp": "logsumexp of rows",
    "Prod": "a product of rows",
}
"""What operations compute along the dimension of rows."""
_NONLINEAR = {
    "Sqrt", "Rsqrt", "Log", "Log10", "Log2", "Log1P", "Exp", "Expm1", "Pow", "Reciprocal", "Sigmoid", "Tanh",
    "Abs", "Relu", "Softplus", "LogSigmoid", "Xlogy", "MseLoss", "SmoothL1Loss", "HuberLoss",
    "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Maximum", "Minimum", *_OF_ROWS,
}  # fmt: skip
"""What makes a loss that is a mean or sum over rows another loss."""
