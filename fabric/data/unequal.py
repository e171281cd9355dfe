"""Warnings for losses whose mean over ranks is not the mean over all items, and for ranks that draw the same
batches; each compares once.

The mean over ranks of means over 3 and over 2 rows is not the mean over 5 rows. So it is with tokens.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabric.collectives.reduced_gradients import compare_mean_gradients
from fabric.core._torch import in_function_transform
from fabric.core.backward_listeners import add_backward_listener
from fabric.core.tree import flatten
from fabric.data._torch import saved
from fabric.data.loader import sharded_iterations
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import RanksDifferWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class FirstCall:
    """The forward of a set-up model until `restore_forward`: records its first training calls.

    Not a hook of the module, since `torch.compile` would trace it.

    Args:
        call: The forward.
        digest: Returns a digest of tensors without a host sync.
    """

    __slots__ = ("__weakref__", "call", "digest", "digests", "dims", "rows", "sizes")

    def __init__(self, call: Callable[..., Any], digest: Callable[[list[Any]], Any]) -> None:
        self.call, self.digest = call, digest
        self.digests: list[Any] = []
        """Digests of the tensors of the first two calls; of none if Fabric shards the data, or if there are
        other objects, which may have data of this rank."""
        self.rows: int | None = None
        """Rows of the first tensor; 0: no tensor, or Fabric shards the data; None: not called yet."""
        self.sizes: list[int] = []
        """Rows of the first tensor in each call, also if Fabric shards the data."""
        self.dims = 0
        """Dimensions of the first tensor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, and run the forward."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and len(self.sizes) < _MAX_CALLS:
            leaves = flatten((args, kwargs))[0]
            shape = next((shape for leaf in leaves if (shape := getattr(leaf, "shape", ()))), ())
            self.sizes.append(shape[0] if shape else 0)
            if self.rows is None:
                self.rows, self.dims = 0 if sharded_iterations else self.sizes[0], len(shape)
            plain = [leaf for leaf in leaves if type(leaf) is torch.Tensor and leaf.layout == torch.strided]
            others = [
                leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | int | float | str | None)
            ]
            known = len(self.digests) < _CALLS and not (
                sharded_iterations or others or in_function_transform()
            )
            if known and any([leaf.numel() > 1 for leaf in plain]):
                self.digests.append(self.digest(plain))
        return self.call(*args, **kwargs)


class FirstRows:
    """The first calls of one set-up model, to which it has weak references, so that it can be collected.

    Args:
        wrapped: The model.
        digest: See `FirstCall`.
    """

    def __init__(self, wrapped: Any, digest: Callable[[list[Any]], Any]) -> None:
        first = wrapped.__dict__["forward"] = FirstCall(wrapped.__dict__["forward"], digest)
        self._model, self._first = weakref.ref(wrapped), weakref.ref(first)
        self.name = type(wrapped.module).__name__
        self.digests: list[Any] = []
        """As `FirstCall.digests`."""
        self.rows = 0
        """The rows recorded before `restore_forward`; 0: none."""
        self.sizes: list[int] = []
        """As `FirstCall.sizes`."""
        self.loss: FirstLosses | None = FirstLosses()
        self.losses: list[list[Term]] = []
        """The terms of the first two losses."""
        self.values: list[Any] = []
        """Their values."""
        self.dims = 0
        """As `FirstCall.dims`."""

    def restore_forward(self) -> None:
        """Restore the original forward, unless it was compiled: torch would compile the original again."""
        if self.loss is not None:
            self.losses, self.values, self.loss = self.loss.losses, self.loss.values, None
        model, first = self._model(), self._first()
        if first is not None:
            self.rows, self.sizes, self.digests = first.rows or 0, first.sizes, first.digests
            self.dims = first.dims
            attributes, plain = {} if model is None else vars(model), first.call
            if first.rows is not None and attributes.get("forward") is first:
                attributes["forward"] = plain


def restore_forwards(first: list[FirstRows]) -> None:
    """Restore the original forwards of all models."""
    for first_rows in first:
        first_rows.restore_forward()


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


class FirstLosses:
    """A backward listener until the second synchronised backward, which records the first two losses."""

    def __init__(self) -> None:
        self.losses: list[list[Term]] = []
        self.values: list[Any] = []
        add_backward_listener(self)

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Record the factors of the loss, whose graph the backward frees, and run the backward."""
        roots = [*tensors] if isinstance(tensors, list | tuple) else [tensors]
        is_loss = len(roots) == 1 and isinstance(roots[0], torch.Tensor) and not roots[0].dim()
        if len(self.losses) < _CALLS:
            self.losses.append(_terms(roots[0].grad_fn) if is_loss else [])
            self.values.append(roots[0].detach() if is_loss else None)
        run(tensors, *args, **kwargs)

    def after_nested_pass(self) -> None:
        """Do nothing: a nested pass is a part of the loss."""


def _terms(node: Any, depth: int = 0) -> list[Term]:
    """Return the terms of a loss, down to the reduction of each; none if one is unknown.

    Args:
        node: The node of the graph that computed the loss.
        depth: The number of nodes above it.
    """
    kind, nodes = type(node).__name__, [] if node is None else [each for each, _ in node.next_functions]
    if kind in _REDUCTIONS or saved(node, "reduction") in (1, 2):
        return [_REDUCTIONS.get(kind, _of_elements)(node)]
    if depth > _MAX_DEPTH or not nodes:
        return []
    if kind in ("AddBackward0", "SubBackward0"):
        found: list[Term] = []
        for each in [each for each in nodes if each is not None]:
            if not (terms := _terms(each, depth + 1)):
                return []
            found += terms
        return found
    if (factors := _factors(node)) is None:
        return []
    return [term._replace(factors=factors + term.factors) for term in _terms(_inner(node), depth + 1)]


def _inner(node: Any) -> Any:
    """Return the first node that computed an input of a node."""
    return next((each for each, _ in node.next_functions if each is not None), None)


def _factors(node: Any) -> tuple[Any, ...] | None:
    """Return the number that a node multiplies by, nothing if it is 1; None: the node does something else."""
    kind = type(node).__name__
    if kind in _SAME:
        return ()
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
    """Return a sum, which counts items if the losses of items are known not to be weighted.

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


_MAX_CALLS = 64
"""Largest number of calls whose rows are recorded."""
_CALLS = 2
"""Calls whose batches are compared: a loop that trains on one batch only has the same on all ranks."""
_MAX_DEPTH = 16
"""Where both terms of each sum contain the sum before, terms double with each node."""
_SAME = {"NegBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0", "CloneBackward0"}
"""Nodes that change no weight."""
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
_REDUCTIONS = {**_OF_TORCH, **dict.fromkeys(_MEANS, _of_mean), **dict.fromkeys(_SUMS, _of_sum)}
"""Nodes of torch that reduce losses of items to one number; others with a reduction are `_of_elements`."""
_OF_ITEMS = {*_OF_TORCH, "PowBackward0", "AbsBackward0", "SubBackward0"}
"""Nodes whose elements are losses of items, as a rule: others may multiply them by weights of a mean."""


def compare_first_calls(first: list[FirstRows], strategy: Any, ignore_rows: bool) -> None:
    """Compare over ranks: rows of all models, the weight of an item in two losses, the batches, gradients
    through means in place. Warn if what they make of it is not what one process does. All ranks must call
    this, after the second synchronised backward or later.

    Args:
        first: The models.
        strategy: Of these models.
        ignore_rows: Whether the loop called `normalize_gradients`, so that rows and items may differ.
    """
    digests = [[int(digest) for digest in each.digests] for each in first]
    channel = strategy.channel()
    found, channel.mean_gradients = channel.mean_gradients or [], None
    means = [(label, line, float(total), float(size)) for label, line, total, size in found]
    values = [None if value is None else float(value) for value in first[0].values]
    local = _rows_of(first), digests, means, values
    gathered = strategy.all_gather_object(local, label="replica check of first calls")
    rows, digests_by_rank, means_by_rank, values_by_rank = zip(*gathered, strict=True)
    compare_mean_gradients(means_by_rank)
    if not ignore_rows:
        _compare_rows(rows)
    replicas = (strategy.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
    if len(gathered) != replicas or replicas == 1:
        return  # some ranks need the same batches, as those of a pipeline do
    if not ignore_rows and all([of_rank.is_sum for of_rank in rows]):
        _warn_of_sum(replicas)
    if None in values or not all([of_rank == values for of_rank in values_by_rank]):
        return  # what is learned from equal batches may differ: actions that were drawn, other losses
    for model, by_rank in zip(first, zip(*digests_by_rank, strict=True), strict=True):
        if len({*by_rank[0]}) == _CALLS and all([of_rank == by_rank[0] for of_rank in by_rank]):
            _warn_of_same(model.name, replicas)


class _Compared(NamedTuple):
    """Facts of rows and losses of the first calls that ranks compare."""

    terms: tuple[int, ...]
    """Number of terms of each loss."""
    weights: tuple[float, ...]
    """The weight of an item in each; 0: unknown."""
    sizes: tuple[tuple[int, ...], ...]
    """As `FirstCall.sizes`, of each model."""
    rows: tuple[int, ...]
    """Rows of each model."""
    is_sum: bool
    """Whether the first loss is a sum over rows."""


def _rows_of(first: list[FirstRows]) -> _Compared:
    losses, model = first[0].losses, next((each for each in first if any(each.sizes)), None)
    return _Compared(
        terms=tuple(map(len, losses)),
        weights=tuple([sum([term.weight() for term in terms]) for terms in losses]),
        sizes=tuple([tuple(each.sizes) for each in first]),
        rows=tuple([each.rows for each in first]),
        is_sum=bool(losses) and model is not None and model.dims > 1 and _is_sum(losses[0], model.sizes[0]),
    )


def _compare_rows(by_rank: Sequence[_Compared]) -> None:
    """Warn if rows, or weights of items, differ between ranks."""
    unequal = [rows for rows in zip(*[of_rank.rows for of_rank in by_rank], strict=True) if all(rows)]
    unequal = [rows for rows in unequal if len({*rows}) > 1]
    for rows in unequal:
        _warn_of_unequal([*rows])
    if unequal:
        return
    sizes = [next((calls[0] for calls in of_rank.sizes if any(calls)), 0) for of_rank in by_rank]
    complete = all([len(calls) < _MAX_CALLS for of_rank in by_rank for calls in of_rank.sizes])
    equal_sizes = complete and len({of_rank.sizes for of_rank in by_rank}) == 1
    for index in range(min([len(of_rank.weights) for of_rank in by_rank])):
        weights = [of_rank.weights[index] for of_rank in by_rank]
        # A rank with a term of its own has another loss.
        comparable = all(weights) and len({of_rank.terms[index] for of_rank in by_rank}) == 1
        # `uneven="exact"` accepts a mean over unequal numbers of rows: weights times rows are equal. Which
        # rows a later loss is of is not known.
        of_rows = [weight * size or weight for weight, size in zip(weights, sizes, strict=True)]
        if comparable and (equal_sizes or not index) and _differ(weights) and _differ(of_rows):
            _warn_of_weights(weights)
            return


def _is_sum(terms: list[Term], rows: int) -> bool:
    """Whether a loss is a sum over `rows` rows: no term is a mean, and one is known to sum their losses."""
    weights = [abs(term.weight()) for term in terms]
    pairs = [*zip(terms, weights, strict=True)] if rows > 1 else []
    sums = [1 for term, weight in pairs if weight == 1 and term.numel > 0 and term.numel % rows == 0]
    return bool(sums) and min(weights) > 1 / rows


def _differ(numbers: Sequence[float]) -> bool:
    return not all([math.isclose(numbers[0], each, rel_tol=1e-4) for each in numbers])


def _warn_of_weights(weights: list[float]) -> None:
    """Warn of a loss that divides by numbers that differ between ranks."""
    counts = ", ".join([f"{1 / weight:g} on rank {rank}" for rank, weight in enumerate(weights)])
    rank_zero_warn(
        f"The loss of a backward divides by {counts}, as a mean over the tokens or labels of each "
        "rank does (ignore_index, a mask, class weights). Gradients are averaged over ranks, so an item has "
        "more weight where there are fewer. Sum the losses of items, for example by "
        'cross_entropy(..., reduction="sum"), and write fabric.normalize_gradients(model, num_items) before '
        "each step; or divide by a number of all ranks.",
        category=RanksDifferWarning,
    )


def _warn_of_sum(ranks: int) -> None:
    """Warn of a loss that is a sum over rows."""
    rank_zero_warn(
        f"The loss of the first backward is a sum over its items. Gradients are averaged over {ranks} ranks, "
        f"so they are 1/{ranks} of those of one process with the whole batch. Use a mean; or write "
        "fabric.normalize_gradients(model, num_items) before each step, also on one process; or multiply the "
        "loss by fabric.world_size.",
        category=RanksDifferWarning,
    )


def _warn_of_same(name: str, ranks: int) -> None:
    """Warn that all ranks drew the same batches."""
    rank_zero_warn(
        f"All ranks called {name} with the same batches, so {ranks} ranks learn what one learns. Write "
        "fabric.setup_dataloaders(loader) for those of a loader; or draw others on each rank, after "
        "fabric.seed_everything(seed, per_rank=True) below the line that makes the model; or use the rows "
        "batch[fabric.global_rank :: fabric.world_size].",
        category=RanksDifferWarning,
    )


def _warn_of_unequal(rows: list[int]) -> None:
    """Warn that ranks had unequal numbers of rows; `rows`: in rank order."""
    counts = ", ".join([f"{count} on rank {rank}" for rank, count in enumerate(rows)])
    rank_zero_warn(
        f"Ranks were given unequal numbers of rows: {counts}. Gradients are averaged over ranks, so a "
        "row of a smaller batch has more weight. Shard with fabric.setup_dataloaders(loader); or sum the "
        "losses of rows, and write fabric.normalize_gradients(model, num_rows) before each step.",
        category=RanksDifferWarning,
    )


def warn_of_last_batch(rows: int, strategy: Any) -> None:
    """Warn that the last global batch of an epoch, of `rows` rows, did not divide by the ranks."""
    shards = strategy.distributed_sampler_kwargs["num_replicas"]
    rank_zero_warn(
        f"The last batch of this epoch has {rows} rows, which {shards} ranks cannot share equally: some "
        "ranks had a row less, or a row twice (shuffled loaders). So the mean of their losses is not the "
        "mean over the batch, as one process computes it. Write DataLoader(..., drop_last=True), or choose "
        "a batch_size or a dataset that divides. To accept it without this warning, write "
        'fabric.setup_dataloaders(loader, uneven="exact"), or uneven="pad" to repeat rows.',
        category=RanksDifferWarning,
    )
