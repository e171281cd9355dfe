"""Losses that are no mean over rows: a root or a quotient of means, a norm, products of rows with other rows.

The mean of such losses of parts of a batch is not the loss of the batch.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from fabric.core._torch import node_number
from fabric.loss_check.row_dims import JOINED, MATRIX_PRODUCTS, RowDims, name_of

if TYPE_CHECKING:
    from fabric.loss_check.row_dims import Operation

ROWS_WITH_ROWS = "products of rows with other rows"


def nonlinear_part(root: Any, outputs: set[int], rows: int) -> str:
    """Return the name of an operation that makes a loss no mean over rows, such as `sqrt of a mean`; "": none
    was found, or one for each row.

    Args:
        root: The node of the graph that computed the loss.
        outputs: Numbers of the nodes of the model's outputs, where the search ends.
        rows: Rows of the batch.
    """
    search = _Search()
    dims = RowDims(lambda node: node_number(node) in outputs, rows, search.add)
    dims.read(root)
    found = Counter(search.found.values())
    if found[ROWS_WITH_ROWS]:
        return ROWS_WITH_ROWS
    # A loop over rows, which masks each, has an operation for each.
    return next((kind for kind, count in found.items() if count < rows and not dims.is_cut), "")


class _Search:
    """The operations that make a loss no mean over rows, in the order of the computation."""

    def __init__(self) -> None:
        self.found: dict[Any, str] = {}

    def add(self, done: Operation) -> None:
        """Record an operation if it is one. Roots that are squared, such as `x.norm() ** 2`, are none."""
        squared = done.node.next_functions[0][0]
        while name_of(squared) in _SCALED:
            squared = next((each for each, _ in squared.next_functions if each is not None), None)
        if done.name == "Pow" and done.exponent == 2 and name_of(squared) in _ROOTS:
            self.found.pop(squared, None)
        elif kind := _kind(done):
            self.found[done.node] = kind


def _kind(done: Operation) -> str:
    """Return the name of an operation, if it makes a loss no mean over rows."""
    if _is_between_rows(done):
        return ROWS_WITH_ROWS
    if JOINED in done.known:
        return _kind_of_joined(done)
    return _OF_ROWS[done.name] if done.name in _OF_ROWS and done.acts_on_rows() else ""


def _kind_of_joined(done: Operation) -> str:
    """Return the name of an operation on a sum or mean over rows, if it is not linear in it."""
    if len(done.dims) == 1 and done.name in ("Mul", "Div"):
        return ""  # by a number
    if done.name == "Div" and done.dims[1] == JOINED:
        return "a quotient by a mean or sum"
    if done.name in _PRODUCTS and None not in done.dims[-2:]:
        return "a product with a mean or sum"
    if done.name in _NONLINEAR and done.exponent != 1:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", done.name).lower()
        return f"{words} of a mean, sum or difference of rows"
    return ""


def _is_between_rows(done: Operation) -> bool:
    """Whether an operation multiplies, or measures distances of, rows and other rows."""
    if done.name == "Pdist":
        return True
    left, right = done.dims[-2:] if len(done.dims) > 1 else (None, None)
    if left in (None, JOINED) or right in (None, JOINED):
        return False
    if done.name in MATRIX_PRODUCTS:  # (-1, -2): a sum over rows of products within them
        return (left, right) not in ((-3, -3), (-1, -2))
    if done.name == "Mv":
        return (left, right) != (-1, -1)
    if done.name == "Cdist":
        return left != right or left > -3
    return done.name in _PAIRWISE and left != right


_PRODUCTS = {*MATRIX_PRODUCTS, "Mul", "Mv", "Dot"}
_PAIRWISE = {"Mul", "Div", "Maximum", "Minimum", "Pow", "Logaddexp"}
_ROOTS, _SCALED = {"LinalgVectorNorm", "Norm", "Sqrt"}, {"Mul", "Div", "Neg", "View"}
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
    "Sqrt", "Rsqrt", "Log", "Log10", "Log2", "Log1P", "Exp", "Expm1", "Pow", "Reciprocal", "Abs", "Sin",
    "Cos", "Sigmoid", "Tanh", "Erf", "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Softplus", "LogSigmoid",
    "Xlogy", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits",
    "Maximum", "Minimum", "Cdist", *_OF_ROWS,
}  # fmt: skip
"""What makes a loss that is a mean or sum over rows another loss."""
