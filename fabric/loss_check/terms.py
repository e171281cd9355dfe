"""The terms of a loss, read from its graph: the divisor of each mean, or that a term is a sum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.loss_check._torch import saved

if TYPE_CHECKING:
    from collections.abc import Callable


class Term(NamedTuple):
    """One term of a loss."""

    factors: tuple[Any, ...]
    """Numbers and tensors of one element. Their product is the weight of an item."""
    numel: int = 0
    """Elements that are summed, if each is known to be a loss of its own; 0: a mean, or unknown."""

    def weight(self) -> float:
        """Return the weight of an item; 0: not finite."""
        value = math.prod([float(factor) for factor in self.factors])
        return value if math.isfinite(value) else 0.0


def terms_of(node: Any, depth: int = 0) -> list[Term]:
    """Return the terms of a loss, down to the reduction of each; none if one is unknown.

    Args:
        node: The node of the graph that computed the loss.
        depth: The number of nodes above it.
    """
    kind, nodes = type(node).__name__, [] if node is None else [each for each, _ in node.next_functions]
    if kind in REDUCTIONS or saved(node, "reduction") in (1, 2):
        return [REDUCTIONS.get(kind, _of_elements)(node)]
    if depth > _MAX_DEPTH or not nodes:
        return []
    if kind in ("AddBackward0", "SubBackward0"):
        found: list[Term] = []
        for each in [each for each in nodes if each is not None]:
            if not (terms := terms_of(each, depth + 1)):
                return []
            found += terms
        return found
    if (factors := _factors(node)) is None:
        return []
    return [term._replace(factors=factors + term.factors) for term in terms_of(_inner(node), depth + 1)]


def _inner(node: Any) -> Any:
    """Return the first node that computed an input of a node."""
    return next((each for each, _ in node.next_functions if each is not None), None)


def _factors(node: Any) -> tuple[Any, ...] | None:
    """Return the number that a node multiplies by in a tuple, empty if it is 1; None: another kind."""
    kind = type(node).__name__
    if kind in _SAME:
        return ()
    if kind in ("MulBackward1", "DivBackward1"):  # by a number, as torch's label smoothing does
        number = saved(node, "other")
        return (number if kind == "MulBackward1" else 1 / number,)
    if kind not in ("MulBackward0", "DivBackward0"):
        return None
    nodes = [each for each, _ in node.next_functions]
    factor = saved(node, "other") if nodes[0] is not None else saved(node, "self")
    by_number = factor is not None and factor.numel() == 1 and None in nodes
    if not by_number or (kind == "DivBackward0" and nodes[0] is None):
        return None
    return (factor.detach() if kind == "MulBackward0" else 1 / factor.detach(),)


def _of_mean(node: Any) -> Term:
    return Term((1 / max(saved(node, "self_sym_numel"), 1),))


def _of_sum(node: Any) -> Term:
    """Return the term of a sum. Its `numel` is set if the losses of items are known not to be weighted.

    Its factors include the numbers by which all items are multiplied: `(losses / count).sum()`.
    """
    inner: Any = _inner(node)
    factors: list[Any] = [1.0]
    while inner is not None and len(factors) < _MAX_DEPTH and (found := _factors(inner)) is not None:
        factors += found
        inner = _inner(inner)
    known = type(inner).__name__ in _OF_ITEMS and saved(node, "self_sym_sizes") is not None
    statistic = _inner(inner) if known else None  # (x.mean(0) - 1).square().sum() is no sum over rows
    while type(statistic).__name__ in {*_SAME, "AddBackward0", "SubBackward0"}:
        statistic = _inner(statistic)
    known = known and type(statistic).__name__ not in {*_SUMS, *_MEANS}
    return Term((*factors,), math.prod(saved(node, "self_sym_sizes")) if known else 0)


def _of_labels(node: Any) -> Term:
    """Return the term of a loss that divides by the sum of the weights of its labels, or sums."""
    mean = saved(node, "reduction") == 1
    return Term((1 / saved(node, "total_weight"),)) if mean else Term((1.0,), saved(node, "target").numel())


def _of_elements(node: Any) -> Term:
    """Return the term of a loss that divides by the number of elements, or sums."""
    numel = saved(node, "self").numel()
    return Term((1 / max(numel, 1),)) if saved(node, "reduction") == 1 else Term((1.0,), numel)


_MAX_DEPTH = 16
"""Largest depth of the graph that is searched: terms can double with each node."""
_SAME = {"NegBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0", "CloneBackward0"}
"""Nodes that multiply by 1 or -1."""
_OF_TORCH: dict[str, Callable[[Any], Term]] = {
    "NllLossBackward0": _of_labels,
    "NllLoss2DBackward0": _of_labels,
    "MseLossBackward0": _of_elements,
    "SmoothL1LossBackward0": _of_elements,
    "HuberLossBackward0": _of_elements,
    "BinaryCrossEntropyBackward0": _of_elements,
    "BinaryCrossEntropyWithLogitsBackward0": _of_elements,
}
"""Nodes of torch's losses."""
_SUMS = ("SumBackward0", "SumBackward1", "NansumBackward0", "DotBackward0")
_MEANS = ("MeanBackward0", "MeanBackward1")
REDUCTIONS = {**_OF_TORCH, **dict.fromkeys(_MEANS, _of_mean), **dict.fromkeys(_SUMS, _of_sum)}
"""Nodes that reduce losses of items to one number. All others with a reduction: `_of_elements`."""
_OF_ITEMS = {*_OF_TORCH, "PowBackward0", "AbsBackward0", "SubBackward0"}
"""Nodes whose elements usually are losses of items. Other nodes may multiply losses by weights of a mean."""
