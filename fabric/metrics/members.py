"""The metrics in what a user passed: where they keep their states, and how these become one.

Called by sync.py. Knows torchmetrics, and nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torchmetrics import Metric, MetricCollection, regression
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_mean,
    dim_zero_min,
    dim_zero_sum,
)
from torchmetrics.wrappers import MetricTracker
from torchmetrics.wrappers.abstract import WrapperMetric

from fabric.core.errors import ArgumentTypeError, UsageError
from fabric.core.tree import iter_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

FOLDS = ("sum", "min", "max")
"""Rules that a reduction over ranks can carry out; all others need every rank's part."""
_RULES = {
    id(dim_zero_sum): "sum",
    id(dim_zero_min): "min",
    id(dim_zero_max): "max",
    id(dim_zero_mean): "mean",
    id(dim_zero_cat): "cat",
    id(None): "none",
}
"""By id: a user's callable need not be hashable."""
_RUNNING_COUNT = "_num_vals_seen"


class State(NamedTuple):
    """One state of one metric."""

    metric: Any
    name: str
    rule: str
    """"sum", "min", "max", "mean", "cat", "none" or "call"."""
    call: Callable[[Any], Any] | None
    """The metric's own reduction, for "call"."""

    @property
    def value(self) -> Any:
        """What this rank holds: a tensor, or a list."""
        return getattr(self.metric, self.name)

    @property
    def device(self) -> torch.device:
        """Where this rank keeps the state."""
        value = self.value
        if not isinstance(value, torch.Tensor):
            first = next(iter(value), None) if isinstance(value, Iterable) else None
            if not isinstance(first, torch.Tensor):
                on_host = self.metric.compute_on_cpu and first is None
                return torch.device("cpu") if on_host else self.metric.device
            value = first
        return value.device


class Member(NamedTuple):
    """A metric, as the user would name it, with its states."""

    metric: Any
    name: str
    states: list[State]


class Found(NamedTuple):
    """All metrics of a call."""

    computed: list[Any]
    """The leaves of the user's tree, to call `compute` of."""
    members: list[Member]
    """Every metric in them, once."""
    groups: list[Any]
    """Every MetricCollection in them, once."""
    drawn: list[str]
    """Every leaf as a person would write it down: classes, states and their rules."""


def find(leaves: list[Any], tree: Any) -> Found:
    """The metrics among `leaves`, the leaves of `tree`.

    Raises:
        ArgumentTypeError: A leaf is no metric.
        UsageError: A metric is synchronised already, or a MetricTracker was never incremented.
    """
    found, seen = Found([], [], [], []), set[int]()
    for place, leaf in enumerate(leaves):
        target = leaf
        if isinstance(leaf, MetricTracker):
            if not leaf._increment_called:
                raise UsageError(
                    "compute_metrics of a MetricTracker gives the value of its current step, but it has none "
                    "yet. Call tracker.increment() first."
                )
            target = leaf[-1]
        if not isinstance(target, (Metric, MetricCollection)):
            path = [path for path, _ in iter_paths(tree)][place]
            raise ArgumentTypeError(
                f"compute_metrics takes torchmetrics metrics, MetricCollections, and nestings of them, but "
                f"metrics{path} is {type(leaf).__name__}: {leaf!r:.80}. Pass an object of a subclass of "
                "torchmetrics.Metric, or use fabric.all_reduce for tensors and numbers."
            )
        found.computed.append(target)
        texts: list[str] = []
        _walk(target, "", found, seen, texts)
        found.drawn.append(" ".join(texts))
    return found


def updates_of(metric: Any) -> int:
    """How often the metric was updated on this rank; at least 1 if it was."""
    count = int(metric._update_count)
    if count or not isinstance(metric, WrapperMetric):
        return count
    # Wrappers do not count; torchmetrics' own one with states counts by itself.
    if hasattr(metric, _RUNNING_COUNT):
        return int(getattr(metric, _RUNNING_COUNT))
    return int(any([_changed(getattr(metric, name), old) for name, old in metric._defaults.items()]))


@contextmanager
def lent(found: Found, states: list[tuple[State, Any]], updates: list[int]) -> Iterator[None]:
    """In the block the metrics hold other states, and synchronise nothing; afterwards all is as it was.

    Args:
        found: All metrics of the call.
        states: States with the values that they have in the block.
        updates: How often each member was updated, in the block; 0 leaves its own count.
    """
    saved: list[tuple[Any, dict[str, Any]]] = []
    try:
        for member, count in zip(found.members, updates, strict=True):
            flags: dict[str, Any] = {"_computed": None, "_to_sync": False}
            if count:
                own_count = _RUNNING_COUNT if hasattr(member.metric, _RUNNING_COUNT) else "_update_count"
                flags[own_count] = count
            _swap(member.metric, flags, saved)
        for group in found.groups:  # else it copies the states of one member over those of others
            _swap(group, {"_groups": {}, "_state_is_copy": group._state_is_copy}, saved)
        for state, value in states:
            _swap(state.metric, {state.name: value}, saved)
        yield
    finally:
        for owner, old in reversed(saved):
            _assign(owner, old)


def _walk(module: Any, name: str, found: Found, seen: set[int], texts: list[str]) -> None:
    # Children first: a ClasswiseWrapper shows the states of the metric inside as its own.
    # By id: a metric's hash reads its states, and its == gives a metric.
    known = id(module) in seen
    seen.add(id(module))
    for key, child in module._modules.items():
        if child is not None:
            _walk(child, f"{name}.{key}" if name else key, found, seen, texts)
    kind, title = type(module).__name__, f"{name}: " if name else ""
    if isinstance(module, MetricCollection):
        texts.append(f"{title}{kind}({module.prefix!r}, {module.postfix!r})")
        if not known:
            found.groups.append(module)
    elif isinstance(module, Metric):
        states = [] if id(module._defaults) in seen else _states(module)
        described = ", ".join([_describe(state) for state in states])
        texts.append(f"{title}{kind}({described})")
        if known:
            return
        if module._is_synced:
            raise UsageError(
                f"compute_metrics: {name or kind} holds the states of all ranks already. Call .unsync() on "
                "it before, or do not call .sync()."
            )
        seen.add(id(module._defaults))
        found.members.append(Member(module, f"{name} ({kind})" if name else kind, states))


def _states(metric: Any) -> list[State]:
    made = []
    for name in metric._defaults:
        reduction = metric._reductions[name]
        rule = _RULES.get(id(reduction), "call")
        made.append(State(metric, name, rule, reduction if rule == "call" else None))
    return made


def _describe(state: State) -> str:
    default = state.metric._defaults[state.name]
    shape = list(default.shape) if isinstance(default, torch.Tensor) else "..."
    return f"{state.name} {state.rule}{shape}"


def _changed(value: Any, default: Any) -> bool:
    if isinstance(default, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.shape != default.shape or not torch.equal(value, default.to(value.device, value.dtype))
    return len(value) > 0


def _swap(owner: Any, new: dict[str, Any], saved: list[tuple[Any, dict[str, Any]]]) -> None:
    saved.append((owner, {name: getattr(owner, name) for name in new}))
    _assign(owner, new)


def _assign(owner: Any, values: dict[str, Any]) -> None:
    own = vars(owner)
    for name, value in values.items():
        if name in own:
            own[name] = value  # nn.Module's way would look for parameters and submodules first
        else:
            setattr(owner, name, value)


def repaired(values: list[tuple[State, Any]], ranks: dict[int, int]) -> list[tuple[State, Any]]:
    """The states, those of known metrics pooled.

    Args:
        values: States with their merged values.
        ranks: By the id of each metric, how many ranks updated it.
    """
    # torchmetrics 1.9 aggregates two ranks only, and fails for more: pooled as one process would have them.
    kind = getattr(regression, "NormalizedRootMeanSquaredError", None)
    if kind is None:
        return values
    stacks: dict[int, dict[str, Tensor]] = {}
    for state, value in values:
        if isinstance(state.metric, kind) and ranks[id(state.metric)] > 1:
            stacks.setdefault(id(state.metric), {})[state.name] = value
    pools = {metric: _pool(stacked) for metric, stacked in stacks.items()}
    return [
        (state, pools[id(state.metric)][state.name] if id(state.metric) in pools else value)
        for state, value in values
    ]


def _pool(stacked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Numbers, extremes, means and squared deviations, (ranks, outputs), as of one sample.

    Source: https://en.wikipedia.org/wiki/Algorithms_for_calculating_variance#Parallel_algorithm
    """
    number, means = stacked["total"], stacked["mean_val"]
    mean = (number * means).sum(0) / number.sum(0)
    return {
        "total": number.sum(0),
        "mean_val": mean,
        "var_val": (stacked["var_val"] + number * (means - mean) ** 2).sum(0),
        "min_val": stacked["min_val"].amin(0),
        "max_val": stacked["max_val"].amax(0),
        "target_squared": stacked["target_squared"].sum(0),
    }
