"""The texts of `ReplicasDivergedError`: what differs, on which ranks, since when, the likely cause, and what to write.

Pure: from rows of all ranks, so that the text is the same on all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from torch import Tensor

_MISSING = "not there"


class Described(NamedTuple):
    """A tensor as another rank sees it."""

    name: str
    shape: str
    numel: int
    digest: int | None
    """None: the rank keeps it for itself."""
    writes: int
    """In-place changes of the tensor since it was made, as torch counts them."""
    hooked: bool
    """Whether it has a gradient hook of the user's."""


class Entry(NamedTuple):
    """A tensor of this rank that others hold, too."""

    name: str
    tensor: Tensor | None
    """None: this rank keeps it for itself."""

    def shape_text(self) -> str:
        """Return the name and the shape, which are to be equal on all ranks."""
        shape = "" if self.tensor is None else f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}"
        return f"{self.name}: {shape}"

    def described(self) -> Described:
        """Return what other ranks need; waits for the device."""
        from fabric.replicas.digest import digest_of

        tensor = self.tensor
        if tensor is None:
            return Described(self.name, "", 0, None, 0, False)
        shape = self.shape_text().rpartition(": ")[2]
        digest = int(digest_of([tensor]).item())
        return Described(self.name, shape, tensor.numel(), digest, tensor._version, bool(tensor._backward_hooks))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `0, 2-3` for ranks 0, 2 and 3."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join([f"{first}" if first == last else f"{first}-{last}" for first, last in runs])


def by_value(values: dict[int, Any]) -> str:
    """Return `0, 2-3: 0.1 | 1: 0.05`: the ranks that share each value."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(str(value), []).append(rank)
    return " | ".join([f"{ranks_text(ranks)}: {value}" for value, ranks in groups.items()])


def fact_text(rows: Sequence[dict[str, Any]], everywhere: Collection[int]) -> str | None:
    """Return the text for the first hyper-parameter or counter that differs; None if there is none."""
    order = ("class", "", "steps", "synchronised backwards", "epochs")
    keys = dict.fromkeys([key for row in rows for key in row["facts"] if key[0] in everywhere or key[0] < 0])
    for key in sorted(keys, key=lambda key: order.index(key[1]) if key[1] in order else 1):
        values = {rank: row["facts"].get(key, _MISSING) for rank, row in enumerate(rows)}
        first = values[0]
        if all([value == first or (value != value and first != first) for value in values.values()]):  # noqa: PLR0124
            continue
        number, what, group = key
        name = rows[0]["alive"].get(number, "")
        in_group = f", parameter group {group}," if group else ""
        of = f" of {name}{in_group}" if name else ""
        return f"{what}{of} differs between ranks ({by_value(values)}).{_since(rows)} {_fact_cause(what, rows)}"
    return None


def structure_text(rows: Sequence[dict[str, Any]], held: dict[int, list[Described]]) -> str | None:
    """Return the text for names, order or shapes that differ between ranks that hold the same part; else None."""
    names = {rank: [entry.name for entry in entries] for rank, entries in held.items()}
    first = next(iter(names.values()))
    if any([{*one} != {*first} for one in names.values()]):
        every = {name: None for one in names.values() for name in one}
        name = next(name for name in every if not all([name in one for one in names.values()]))
        values = {rank: "there" if name in one else _MISSING for rank, one in names.items()}
        why = "Build the same model, and set up the same objects, on all ranks."
        return f"{name} is not on all ranks ({by_value(values)}).{_since(rows)} {why}"
    if any([one != first for one in names.values()]):
        at = next(i for i in range(len(first)) if len({one[i] for one in names.values()}) > 1)
        values = {rank: one[at] for rank, one in names.items()}
        return f"Tensor number {at} is another one on each rank ({by_value(values)}). Build the model in one order on all ranks."
    for entries in zip(*held.values(), strict=True):
        shapes = {rank: entry.shape for rank, entry in zip(held, entries, strict=True) if entry.digest is not None}
        if len({*shapes.values()}) > 1:
            why = "The model was converted or changed on some ranks after fabric.setup. Convert it before, or write Fabric(precision=...)."
            return f"{entries[0].name} has another dtype or shape on each rank ({by_value(shapes)}).{_since(rows)} {why}"
    return None


def value_text(rows: Sequence[dict[str, Any]], held: dict[int, Described], distance: Any) -> str:
    """Return the text for a tensor whose values differ."""
    name = next(iter(held.values())).name
    values = {rank: f"{value:.6g}" if isinstance(value, float) else value for rank, value in enumerate(distance.values) if rank in held}
    share = f"{distance.relative:.2g} of its norm" if distance.relative < 1e6 else "not a number on some ranks only"
    return (
        f"{name} differs between ranks ({by_value(values)}, at element {distance.place}; {share})."
        f"{_since(rows)} {_value_cause(name, held, values)}"
    )


def small_text(relative: float, name: str) -> str:
    """Return the warning for values that differ by less than the tolerance."""
    return (
        f"Replicas differ by rounding: {name} by {relative:.1g} of its norm between ranks, as on devices of several "
        "kinds. Above 1e-06 it is an error."
    )


def _since(rows: Sequence[dict[str, Any]]) -> str:
    equal, _ = rows[0]["steps"]
    now = max([row["steps"][1] for row in rows])
    where = rows[0]["place"].rpartition("/")[2]
    since = f"between optimizer steps {equal} and {now}" if now > equal else f"after optimizer step {now}"
    return f" It arose {since}, and was found at {where}."


def _fact_cause(what: str, rows: Sequence[dict[str, Any]]) -> str:
    started = max([row["steps"][1] for row in rows])
    if what == "steps":
        return "Some ranks skipped a step. Let all ranks skip it: `if fabric.any(skip): continue`."
    if what == "synchronised backwards":
        return "Some ranks skipped a backward. Let all ranks decide alike: `if fabric.any(skip): continue`."
    if what == "epochs":
        return "Some ranks ended an epoch earlier. Use loaders from fabric.setup_dataloaders, and the same `break` on all ranks."
    if what in ("class", "number of parameter groups"):
        return "Make the same optimizer, of the same groups, on all ranks: choice = fabric.broadcast(choice)."
    if what in ("max_norm", "clip_val", "norm_type"):
        return f"fabric.clip_gradients was called with another value on each rank. Write {what} = fabric.broadcast({what})."
    if not started:
        return f"The optimizer was made with another {what} on each rank. Write {what} = fabric.broadcast({what})."
    return (
        f"Each rank changed {what} by itself, as a scheduler does that is stepped with the rank's own loss. Write "
        f"scheduler.step(fabric.all_reduce(loss.detach())), or {what} = fabric.broadcast({what})."
    )


def _value_cause(name: str, held: dict[int, Described], values: dict[int, Any]) -> str:
    writes = {entry.writes for entry in held.values()}
    others = {str(value) for rank, value in values.items() if rank}
    on_zero = 0 in values and len(values) > 2 and len(others) == 1
    if name.startswith("buffer"):
        return (
            "Each rank computes this buffer from its own part of the data. Reduce it with fabric.all_reduce in forward, or "
            "write fabric.setup(..., rank_local=[...]) for a buffer of each rank's own."
        )
    if len(writes) > 1 or on_zero:
        return (
            "It was written on some ranks only, as by load_state_dict or an in-place change under "
            "`if fabric.is_global_zero:`. Make the call on all ranks, with values from fabric.broadcast."
        )
    if any([entry.hooked for entry in held.values()]):
        return "A hook of yours on this tensor changes gradients differently on each rank. Reduce in it: fabric.all_reduce(grad)."
    if name.startswith("state"):
        return (
            "Gradients were changed after the backward on some ranks. Do the same on all ranks, or "
            "fabric.all_reduce(p.grad)."
        )
    return (
        "All ranks wrote it, with other values: a re-initialisation by each rank's own random numbers (seed all ranks "
        "alike before it, or fabric.broadcast the values), or gradients that each rank changed after the backward."
    )
