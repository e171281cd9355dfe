"""Texts of `ReplicasDivergedError`: the difference, its ranks, the last equal step, the cause, and a fix.

Pure functions of rows of all ranks, so that the text is equal on all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.core.messages import by_value
from fabric.replicas.digest import WRITES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fabric.replicas.digest import ComparedTensor

_MISSING = "not there"
_ON_ALL_RANKS = (
    "A cause is load_state_dict or an in-place change under `if fabric.is_global_zero:`. Make the call on "
    "all ranks, with values from fabric.broadcast."
)
_COUNTERS = {
    "steps": "Some ranks skipped a step. Skip it on all ranks: `if fabric.any(skip): continue`.",
    "synchronised backwards": "Some ranks skipped a backward. Skip it on all ranks: "
    "`if fabric.any(skip): continue`.",
    "epochs": "Some ranks ended an epoch earlier. Use loaders from fabric.setup_dataloaders, and the same "
    "`break` on all ranks: `if fabric.any(stop): break`.",
    "replica_check": "Give Fabric(replica_check=...) and FABRIC_REPLICA_CHECK the same value on all ranks.",
}


class Distance(NamedTuple):
    """Difference between the ranks' values of a tensor."""

    relative: float
    """The largest norm of a difference, divided by the norm of the first rank's tensor."""
    element: int
    """The first element that differs, in row-major order."""
    values: dict[int, Any]
    """That element on each rank that has the tensor."""


def fact_text(rows: Sequence[dict[str, Any]], on_all_ranks: Collection[int]) -> str | None:
    """Return the text for the first hyper-parameter or counter that differs; None: all are equal.

    Args:
        rows: For each rank `facts` by (number of the optimizer or -1, name of the fact, parameter group).
        on_all_ranks: Numbers of the optimizers that all ranks have.
    """
    keys = dict.fromkeys(
        [key for row in rows for key in row["facts"] if key[0] in on_all_ranks or key[0] < 0]
    )
    for key in keys:  # in the order of reports
        values = {rank: row["facts"].get(key, _MISSING) for rank, row in enumerate(rows)}
        if len({"nan" if value != value else value for value in values.values()}) == 1:
            continue
        number, fact, group = key
        name = rows[0]["alive"].get(number, "")
        of = f" of {name}{f', parameter group {group},' * bool(group)}" * bool(name)
        verb = "differ" if fact in ("steps", "synchronised backwards", "epochs") else "differs"
        text = f"{fact}{of} {verb} between ranks ({by_value(values)})."
        return f"{text} {_since(rows)} {_fact_cause(fact, max([row['steps'][1] for row in rows]))}"
    return None


def structure_text(rows: Sequence[dict[str, Any]], by_rank: dict[int, list[ComparedTensor]]) -> str | None:
    """Return the text for names, order or shapes that differ between ranks with the same key; else None."""
    names = {rank: [entry.name for entry in entries] for rank, entries in by_rank.items()}
    first = next(iter(names.values()))
    all_names = dict.fromkeys([name for local_names in names.values() for name in local_names])
    for name in all_names:
        values = {rank: "there" if name in local_names else _MISSING for rank, local_names in names.items()}
        if _MISSING in values.values():
            remedy = "Build the same model, and set up the same objects, on all ranks."
            return f"{name} is not on all ranks ({by_value(values)}). {_since(rows)} {remedy}"
    for index, name in enumerate(first):
        values = {rank: local_names[index] for rank, local_names in names.items()}
        if len({*values.values()}) > 1:
            remedy = "Build the model in the same order on all ranks."
            return f"Tensor number {index} differs between ranks ({by_value(values)}). {remedy}"
        shapes = {rank: entries[index].shape for rank, entries in by_rank.items() if entries[index].shape}
        if len({*shapes.values()}) > 1:
            changed = WRITES in next(iter(shapes.values()))
            problem = (
                "was changed on some ranks only" if changed else "has another dtype or shape on each rank"
            )
            remedy = (
                _ON_ALL_RANKS
                if changed
                else (
                    "The model was converted or changed after fabric.setup on some ranks. Convert it before, "
                    "or write Fabric(precision=...)."
                )
            )
            return f"{name} {problem} ({by_value(shapes)}). {_since(rows)} {remedy}"
    return None


def value_text(rows: Sequence[dict[str, Any]], by_rank: dict[int, ComparedTensor], distance: Distance) -> str:
    """Return the text for a tensor whose values differ."""
    name = next(iter(by_rank.values())).name
    values = {rank: f"{v:.6g}" if isinstance(v, float) else v for rank, v in distance.values.items()}
    distance_text = (
        f"{distance.relative:.2g} of its norm" if distance.relative < 1e6 else "not finite on some ranks only"
    )
    text = (
        f"{name} differs between ranks ({by_value(values)} at element {distance.element}; {distance_text})."
    )
    return f"{text} {_since(rows)} {_value_cause(name, by_rank, values)}"


def written_text(rows: Sequence[dict[str, Any]], optimizer: str, number: int) -> str:
    """Return the text for parameters that some ranks have changed outside of steps."""
    counts = by_value({rank: row["writes"][number] for rank, row in enumerate(rows)})
    return (
        f"Parameters of {optimizer} were changed on some ranks only ({counts} {WRITES}). {_since(rows)} "
        f"{_ON_ALL_RANKS}"
    )


def small_text(relative: float, name: str) -> str:
    """Return the warning for values that differ by less than the tolerance."""
    return (
        f"Replicas differ by rounding: {name} by {relative:.1g} of its norm, as on different device models. "
        "More than 1e-06 is an error."
    )


def _since(rows: Sequence[dict[str, Any]]) -> str:
    equal, now = rows[0]["steps"][0], max([row["steps"][1] for row in rows])
    since = f"between optimizer steps {equal} and {now}" if now > equal else f"after optimizer step {now}"
    since = since if now else "before the first optimizer step"
    place = rows[0]["place"].rpartition("/")[2]
    return f"It arose {since}, and was found at the next call of all ranks, {place}."


def _fact_cause(fact: str, steps: int) -> str:
    if fact in _COUNTERS:
        return _COUNTERS[fact]
    if fact in ("class", "number of parameter groups"):
        return "Make the same optimizer on all ranks: choice = fabric.broadcast(choice)."
    remedy = f"{fact} = fabric.broadcast({fact})."
    if fact in ("max_norm", "clip_val", "norm_type"):
        return f"fabric.clip_gradients was called with another value on each rank. Write {remedy}"
    if not steps:
        return f"The optimizer was made with another {fact} on each rank. Write {remedy}"
    return (
        f"Each rank changed {fact} by itself, as a scheduler does that is stepped with the rank's own loss. "
        f"Step it with a number that is the same on all ranks, scheduler.step(fabric.all_reduce(loss)), or "
        f"write {remedy}"
    )


def _value_cause(name: str, by_rank: dict[int, ComparedTensor], values: dict[int, Any]) -> str:
    others = {str(value) for rank, value in values.items() if rank}
    zero_alone = 0 in values and len(values) > 2 and len(others) == 1
    writes = {entry.writes for entry in by_rank.values()}
    if name.startswith("buffer"):
        return (
            "Each rank computes this buffer from its own part of the data. Write fabric.all_reduce(value) in "
            'forward, or fabric.setup(..., rank_local=["NAME"]) for a buffer that may differ by rank.'
        )
    if len(writes) > 1 or zero_alone:
        return f"It was written on some ranks only. {_ON_ALL_RANKS}"
    if any([entry.hooked for entry in by_rank.values()]):
        return (
            "A hook on this tensor changes gradients differently on each rank. Write "
            "fabric.all_reduce(grad) in the hook."
        )
    if name.startswith("state"):
        return (
            "Gradients were changed after the backward on some ranks. Write fabric.all_reduce(p.grad) on all."
        )
    first = "All ranks wrote it, with other values. Causes" if writes != {-1} else f"{_ON_ALL_RANKS} Others"
    return (
        f"{first} are: random numbers of each rank (call torch.manual_seed(0) on all ranks before it, or "
        "fabric.broadcast the values); gradients of torch.autograd.grad, or changed after the backward "
        "(write fabric.all_reduce(grads) on all ranks); a forward that computes it from this rank's own rows "
        "(write fabric.all_reduce(value) there)."
    )
