"""A call's arguments in parts along dim 0, and the outputs of the parts as one. On any tree; changes none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.tree import flatten, is_node, iter_paths, map_tree, unflatten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.core.tree import Spec

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of one call."""


class CallParts:
    """The arguments of at most `count` calls, sizes as of `torch.chunk`: 5 rows in 4 parts are 2, 2 and 1.

    Every tensor with dimensions gives each call its own rows (views: what a forward writes into them reaches
    the caller). 0-dim tensors and leaves that are no tensors go to every call. Without rows to split (an
    empty batch, no tensor) there is one call, with the very objects that were given.

    Args:
        args: The positional arguments of the whole call.
        kwargs: Its keyword arguments.
        count: How many parts there may be.
        into: What the parts are for, in errors.

    Raises:
        ConfigurationError: Tensors differ in their number of rows, or one is a PackedSequence.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        count: int,
        into: str = "replicas",
    ) -> None:
        self.whole = (args, kwargs)
        self._leaves, self._spec = flatten(self.whole)
        sizes = {leaf.shape[0] for leaf in self._leaves if _has_rows(leaf)}
        if len(sizes) > 1 or _has_packed(self._spec):
            raise _cannot_split(args, kwargs, self._spec, into)
        rows = next(iter(sizes), 0)
        each = -(-rows // count)
        self.sizes = [min(each, rows - start) for start in range(0, rows, each)] if rows else [1]
        """Rows of each part; [1] where there are no rows to split."""

    def head(self, rows: int) -> Call:
        """The arguments of a call with the first `rows` rows."""
        own = [leaf.narrow(0, 0, rows) if _has_rows(leaf) else leaf for leaf in self._leaves]
        call: Call = unflatten(own, self._spec, self.whole)
        return call

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Call]:
        """One part after the other, each made when it is asked for: an earlier one may have changed the rows
        in place, and with them what autograd knows of the whole.
        """
        if len(self) == 1:
            yield self.whole
            return
        start = 0
        for length in self.sizes:
            # narrow, not chunk: torch refuses to change one of several views in place.
            own = [leaf.narrow(0, start, length) if _has_rows(leaf) else leaf for leaf in self._leaves]
            yield unflatten(own, self._spec, self.whole)
            start += length


def gather_outputs(outputs: list[Any]) -> Any:
    """One output of the type of each: tensors joined along dim 0, 0-dim tensors as a vector with one entry a
    part.

    Raises:
        UsageError: The parts returned different structures, tensors that do not fit, or unequal values of
            other kinds; the message names the place in the output.
    """
    flat = [flatten(output) for output in outputs]
    specs = [spec for _, spec in flat]
    if _has_packed(specs[0]):
        raise UsageError(
            "forward returned a PackedSequence, whose rows are not those of the batch, so the replicas' ones "
            "cannot be joined. Return the padded tensor (pad_packed_sequence with total_length=...)."
        )
    if len(outputs) == 1:
        return map_tree(_as_vector, outputs[0])
    for number, spec in enumerate(specs):
        if spec != specs[0]:
            raise UsageError(
                f"Replica 0 returned {_shape_of(outputs[0])}, but replica {number} "
                f"{_shape_of(outputs[number])}: outputs with different entries cannot be joined. Return the "
                f"same containers for any number of rows, for example one tensor with a row for each sample."
            )
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    joined = [_join(list(column), outputs[0], index) for index, column in enumerate(columns)]
    return unflatten(joined, specs[0], outputs[0])


def _join(column: list[Any], output: Any, index: int) -> Any:
    first = column[0]
    tensors = [leaf for leaf in column if isinstance(leaf, torch.Tensor)]
    if not tensors:
        if all([_same(first, other) for other in column[1:]]):
            return first
        values = ", ".join([_short(value) for value in column])
        raise UsageError(
            f"forward returned values{_place(output, index)} that differ between the replicas and are no "
            f"tensors: {values}. Return them as tensors, which are joined along dim 0."
        )
    here = tensors[0].device
    tensors = [tensor.to(here) for tensor in tensors]
    if len(tensors) == len(column):
        if not any([tensor.dim() for tensor in tensors]):
            return torch.stack(tensors)
        if all([tensor.dim() and tensor.shape[1:] == first.shape[1:] for tensor in tensors]):
            return torch.cat(tensors)
    shapes = ", ".join([_short(leaf) for leaf in column])
    raise UsageError(
        f"forward returned outputs{_place(output, index)} that cannot be joined along dim 0: {shapes}, one "
        f"of each replica. Return tensors that differ in their first dimension only (pad the others)."
    )


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _as_vector(leaf: Any) -> Any:
    return leaf.reshape(1) if isinstance(leaf, torch.Tensor) and not leaf.dim() else leaf


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # arrays and objects of users, which may compare in any way
        return False


def _has_packed(spec: Spec) -> bool:
    # A namedtuple whose tensors are no rows of the batch: split or joined as one it would be wrong silently.
    if spec.kind is PackedSequence:
        return True
    return any([_has_packed(child) for child in spec.children if child.kind is not None])


def _cannot_split(args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec, into: str) -> ConfigurationError:
    if _has_packed(spec):
        return ConfigurationError(
            f"A PackedSequence cannot be split into {into}: its rows are time steps of all samples. Pass "
            "the padded batch and the lengths, and call pack_padded_sequence in forward."
        )
    named = {f"argument {index}": value for index, value in enumerate(args)} | kwargs
    found = [
        f"{name}{path} has {leaf.shape[0]} (shape {list(leaf.shape)})"
        for name, value in named.items()
        for path, leaf in iter_paths(value)
        if _has_rows(leaf)
    ]
    return ConfigurationError(
        f"A batch is split into {into} along dim 0, but its tensors differ in their number of rows: "
        f"{', '.join(found[:4])}{', ...' if len(found) > 4 else ''}. Give each sample its row "
        "(tensor.expand), and keep what belongs to all samples in a buffer of the model."
    )


def _place(output: Any, index: int) -> str:
    path = [path for path, _ in iter_paths(output)][index]
    return f" at output{path}" if path else ""


def _shape_of(output: Any) -> str:
    if not is_node(output):
        return f"a {type(output).__name__}"
    paths = [path for path, _ in iter_paths(output)]
    return f"a {type(output).__name__} with {', '.join(paths[:4]) or 'nothing'}{', ...' if paths[4:] else ''}"


def _short(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"shape {list(leaf.shape)}"
    text = repr(leaf)
    return text if len(text) <= 60 else f"{text[:57]}..."
