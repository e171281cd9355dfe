"""Which dimension of the values in a loss's graph has the rows of the batch.

Read from the graph, from the model's outputs on. A value has one dimension of rows, or is a sum or mean over
rows.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from fabric.core._torch import node_number
from fabric.loss_check._torch import is_nested, saved, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Shape = tuple[int, ...]

JOINED = 0
"""In place of a dimension: the value is a sum, mean or difference of rows, or linear in one."""


WRITE_INTO_PART = "CopySlices"
"""The node of a write in place into a part of a value, such as `similarities.fill_diagonal_(-1e9)`.

Its first operand is the value before the write. What was written is not followed.
"""


class Operation:
    """One node of the graph: an operation, and where its operands have rows.

    Args:
        node: The node.
        dims: For each operand its dimension of rows, counted from the last (-1); `JOINED`; None: it has
            none, or it is unknown.
    """

    def __init__(self, node: Any, dims: Sequence[int | None]) -> None:
        self.node, self.dims = node, [*dims]
        self.name = name_of(node)
        self.known = [dim for dim in dims if dim is not None]
        self.shape = shape_of(node)
        self.exponent = saved(node, "exponent") if type(node).__name__ == "PowBackward0" else None
        """The number of a power; None: another operation, or a tensor, which a checkpoint would compute."""

    def operand_shape(self) -> Shape:
        """Return the shape of the first operand that has rows."""
        index = next(index for index, dim in enumerate(self.dims) if dim is not None)
        return shape_of(*self.node.next_functions[index])

    def acts_on_rows(self) -> bool:
        """Whether the operation acts along the dimension of rows, such as a sum over it; also if over all."""
        shape = self.operand_shape()
        return self.known[0] + len(shape) in self.acted_dims(len(shape))

    def acted_dims(self, num_dims: int) -> list[int]:
        """Return the dimensions along which the operation acts; all of them if it names none."""
        dims = saved(self.node, "dim")
        dims = (dims,) if isinstance(dims, int) else dims or range(num_dims)
        return [_signed(dim) % num_dims for dim in dims]


class RowDims:
    """The dimension of rows of each value between the outputs of a model and a loss.

    Args:
        is_output: Whether a node computed an output of the model, whose first dimension has rows.
        rows: The number of rows of the batch. Parts of a dimension of rows count as known only if they have
            a multiple of it.
        on_operation: Called with each `Operation` that has an operand with rows.
    """

    def __init__(
        self, is_output: Callable[[Any], bool], rows: int, on_operation: Callable[[Operation], None]
    ) -> None:
        self._is_output, self._rows, self._on_operation = is_output, rows, on_operation
        self._nodes: dict[int, Any] = {}  # they exist meanwhile, so that no other node has an id of theirs
        self._dims: dict[int, int | None] = {}
        self.is_cut = False
        """Whether the graph has more nodes than were read."""

    def read(self, root: Any) -> None:
        """Read the graph from a node down to the outputs."""
        nodes = [root]
        while nodes:  # no recursion: graphs may be deep
            node = nodes[-1]
            if node is None or id(node) in self._dims:
                nodes.pop()
            elif id(node) in self._nodes:
                self._dims[id(node)] = self._dim_after(node)
            elif len(self._nodes) == _MAX_NODES:
                self.is_cut = True
                nodes.pop()
            else:
                self._nodes[id(node)] = node
                if is_of_torch(node) and not self._is_output(node):
                    nodes += [each for each, _ in node.next_functions][::-1]

    def _dim_after(self, node: Any) -> int | None:
        """Return the dimension of rows of what a node computed, as in `Operation.dims`."""
        if is_nested(node):
            return None
        if self._is_output(node):
            shape = shape_of(node)
            return -len(shape) if shape and not shape[0] % self._rows else None
        if not is_of_torch(node):
            return None
        done = Operation(node, [self._dims.get(id(each)) for each, _ in node.next_functions])
        if not done.known:
            return None
        if done.name == WRITE_INTO_PART:
            return done.dims[0]
        self._on_operation(done)
        return JOINED if JOINED in done.known else self._dim_of_rows(done)

    def _dim_of_rows(self, done: Operation) -> int | None:
        """Return the dimension of rows after an operation on values with rows."""
        if done.name in {*MATRIX_PRODUCTS, "Mv", "Dot"}:
            return _after_product(done)
        dim, old, new = done.known[0], done.operand_shape(), done.shape
        if done.name in _RESHAPES:
            return _after_reshape(dim, old, new, self._rows)
        if done.name in _PERMUTATIONS:
            return _PERMUTATIONS[done.name](done.node, len(old)).index(dim + len(old)) - len(old)
        if done.name == "Stack":
            return dim - (_signed(saved(done.node, "dim")) % len(new) > dim + len(old))
        if done.name in _REDUCTIONS:
            return JOINED if done.acts_on_rows() else _after_removal(done, dim, old)
        if done.name == "Cumsum" and done.acts_on_rows():
            return JOINED
        if done.name in _SELECTIONS and done.acts_on_rows():
            kept = len(new) == len(old) and not new[dim] % self._rows
            return dim if kept and done.name in _PARTS else None
        if done.name in _SELECTIONS:
            return _after_removal(done, dim, old)
        if saved(done.node, "reduction") in (1, 2):
            return JOINED
        if len(new) == len(old) or _is_broadcast(old, new):
            return dim if len({*done.known}) == 1 else JOINED  # x[:, None] - x
        return -len(new) if new and dim == -len(old) and new[0] == old[0] else None


def name_of(node: Any) -> str:
    """Return the name of what a node's operation computes, such as `Mean`."""
    return re.sub(r"Backward\d*$", "", type(node).__name__)


def is_of_torch(node: Any) -> bool:
    """Whether a node is of one of torch's operations; others may exchange rows between ranks."""
    return type(node).__name__[-1:].isdigit() or type(node).__name__ == WRITE_INTO_PART


def layers_of(root: Any) -> set[int]:
    """Return the numbers of the nodes of the last layers before a loss: products with a parameter."""
    found: set[int] = set()
    seen: set[int] = set()
    nodes = [root]
    while nodes and len(seen) < _MAX_NODES:
        node = nodes.pop()
        if node is None or node_number(node) in seen or not is_of_torch(node):
            continue
        seen.add(node_number(node))
        weights = [_is_parameter(each) for each, _ in node.next_functions]
        if name_of(node) in _LAYERS and any(weights) and not all(weights[-2:]):
            found.add(node_number(node))
        else:
            nodes += [each for each, _ in node.next_functions]
    return found


def _is_parameter(node: Any) -> bool:
    while name_of(node) in _CONVERSIONS:
        node = node.next_functions[0][0]
    return type(node).__name__ == "AccumulateGrad"


def _signed(dim: int) -> int:
    """Return a dimension as the loop wrote it: torch saves -1 as a number without a sign."""
    return dim - 2**64 if dim >= 2**63 else dim


def _after_reshape(dim: int, old: Shape, new: Shape, rows: int) -> int:
    """Return the dimension in which rows are after a reshape, which keeps the order of elements.

    If theirs is split it is the first part that has a multiple of `rows`: two views of each row may be first.
    """
    before, size = math.prod(old[:dim]), 1
    parts = []
    for index, each in enumerate(new):
        if before < size * each and size < before * old[dim]:
            parts.append(index)
        size *= each
    parts = [index for index in parts if not new[index] % rows] or parts
    return parts[0] - len(new) if parts else JOINED


def _is_broadcast(old: Shape, new: Shape) -> bool:
    """Whether a shape is another one with further dimensions at the front."""
    return len(new) > len(old) and all([n in (1, m) for n, m in zip(old[::-1], new[::-1], strict=False)])


def _after_removal(done: Operation, dim: int, old: Shape) -> int:
    """Return the dimension of rows after others were removed, or kept with one element."""
    removed = done.acted_dims(len(old)) if len(done.shape) < len(old) else []
    return dim + len([each for each in removed if each > dim + len(old)])


def _after_product(done: Operation) -> int:
    """Return the dimension of rows after a matrix product; the sum in it may be over rows."""
    left, right = done.dims[-2:]
    if done.name in ("Dot", "Mv"):
        return -1 if left == -2 else JOINED
    if left is None and right is None:
        return done.known[0]  # of the term that `addmm` adds
    return next((dim for dim, summed in ((left, -1), (right, -2)) if dim not in (None, summed)), JOINED)


def _of_permute(node: Any, num_dims: int) -> list[int]:
    return [_signed(dim) % num_dims for dim in saved(node, "dims")]


def _of_transpose(node: Any, num_dims: int) -> list[int]:
    order = [*range(num_dims)]
    first, second = [_signed(saved(node, name)) for name in ("dim0", "dim1")]
    order[first], order[second] = order[second], order[first]
    return order


_MAX_NODES = 300
_RESHAPES = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"}
_PERMUTATIONS: Mapping[str, Callable[[Any, int], list[int]]] = {
    "Permute": _of_permute,
    "Transpose": _of_transpose,
    "T": lambda node, num_dims: [*range(num_dims)][::-1],
}
MATRIX_PRODUCTS = {"Mm", "Addmm", "Bmm", "Baddbmm"}
_CONVERSIONS = {"T", "Transpose", "Permute", "ToCopy", "View"}
"""Operations between a parameter and a product with it."""
_LAYERS = {"Addmm", "Mm", "Linear", "MkldnnLinear", "Convolution", "MkldnnConvolution"}
_REDUCTIONS = {
    "Sum", "Mean", "Nansum", "Prod", "Norm", "LinalgVectorNorm", "Logsumexp", "Var", "Std", "VarMean",
    "StdMean", "Max", "Min", "Amax", "Amin", "Aminmax", "Median", "Nanmedian", "Kthvalue",
}  # fmt: skip
"""Operations that have one value for all elements along their dimensions."""
_PARTS = {"Slice", "Split", "SplitWithSizes", "UnsafeSplit", "IndexSelect", "Narrow"}
"""Operations that keep a part of a dimension. Half of the rows of two views are all rows of the batch."""
_SELECTIONS = {*_PARTS, "Select", "Unbind", "Gather", "Index", "MaskedSelect", "Diagonal"}
"""Operations that keep some elements along a dimension."""
