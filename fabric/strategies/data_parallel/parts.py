"""`MicrobatchArgs`: the arguments of a call, split along dim 0 into several calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from fabric.core.errors import ConfigurationError
from fabric.core.tree import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabric.core.tree import Spec

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of one call."""


class MicrobatchArgs:
    """The arguments of at most `count` calls, with sizes of `torch.chunk`: 5 rows for count=4 are 2, 2 and 1.

    Tensors with dimensions are split into views, so a forward's in-place changes reach the caller. 0-dim
    tensors and other leaves are passed to every call. Without rows (an empty batch, no tensor) there is one
    call, with the same objects.

    Args:
        args: The positional arguments of the whole call.
        kwargs: Its keyword arguments.
        count: Maximum number of calls.
        into: Name of the parts, for errors.

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
        if _has_packed(self._spec):
            raise ConfigurationError(
                f"A PackedSequence cannot be split into {into}: its rows are time steps of all samples. Pass "
                "the padded batch and the lengths, and call pack_padded_sequence in forward."
            )
        sizes = {leaf.shape[0] for leaf in self._leaves if _has_rows(leaf)}
        if len(sizes) > 1:
            shapes = ", ".join(dict.fromkeys([str(list(t.shape)) for t in self._leaves if _has_rows(t)]))
            raise ConfigurationError(
                f"A batch is split into {into} along dim 0, but its tensors differ in their number of rows "
                f"(shapes {shapes}). Give each sample its row (tensor.expand), and keep what belongs to all "
                "samples in a buffer of the model."
            )
        rows = next(iter(sizes), 0)
        each = -(-rows // count)
        self.sizes = [min(each, rows - start) for start in range(0, rows, each)] if rows else [1]
        """Number of rows of each call; [1] without rows."""

    def head(self, rows: int) -> Call:
        """Return the arguments of a call with the first `rows` rows."""
        leaves = [leaf.narrow(0, 0, rows) if _has_rows(leaf) else leaf for leaf in self._leaves]
        call: Call = unflatten(leaves, self._spec, self.whole)
        return call

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Call]:
        """Yield the arguments of each call. Views are created lazily: an earlier call may have changed its
        rows in place, which changes the autograd graph of the whole tensor.
        """
        if len(self) == 1:
            yield self.whole
            return
        start = 0
        for length in self.sizes:
            # narrow, not chunk: torch forbids in-place changes of one of several views.
            leaves = [leaf.narrow(0, start, length) if _has_rows(leaf) else leaf for leaf in self._leaves]
            yield unflatten(leaves, self._spec, self.whole)
            start += length


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _has_packed(spec: Spec) -> bool:
    # A namedtuple whose tensors are no rows of the batch: a split would be silently wrong.
    if spec.kind is PackedSequence:
        return True
    return any([_has_packed(child) for child in spec.children if child.kind is not None])
