"""`ShardedCall`: a call of a module whose sequence is sharded: finds the sequence in arguments and
outputs.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten, iter_paths, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from fabric.strategies.context_parallel.exchange import SequenceExchange
    from fabric.strategies.data_parallel.parts import Call

MASK = "mask"
"""Value in place of a dimension for an attention mask: its last two dimensions are the sequence."""


class ShardedCall:
    """The arguments of one call.

    Args:
        forward: The function that is called.
        name: Name of the module, for errors.
        args: Positional arguments.
        kwargs: Keyword arguments.
        seq_dim: The dimension of the sequence.
        seq_dims: The same for single arguments, by name; None: not sharded.

    Raises:
        UsageError: No argument has a sequence, or an argument is ambiguous.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seq_dim: int,
        seq_dims: Mapping[str, int | None],
    ) -> None:
        self.name, self.seq_dim = name, seq_dim
        self.whole: Call = (args, kwargs)
        names = _names(forward, len(args))
        self.leaves, self.spec = flatten(self.whole)
        owners = [
            name
            for name, value in [*zip(names, args, strict=True), *kwargs.items()]
            for _ in flatten(value)[0]
        ]
        self.length, self.dims = 0, [None] * len(self.leaves)
        self._find(owners, seq_dims)

    def _find(self, owners: list[str], seq_dims: Mapping[str, int | None]) -> None:
        dims: list[Any] = self.dims
        first: Any = None
        for place, (leaf, owner) in enumerate(zip(self.leaves, owners, strict=True)):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.is_nested:
                raise UsageError(
                    f"{owner} of {self.name} is a nested tensor, which ContextParallel cannot divide. "
                    "nn.TransformerEncoder makes one of a padding mask in evaluation: write "
                    "nn.TransformerEncoder(..., enable_nested_tensor=False)."
                )
            dim = seq_dims.get(owner, self.seq_dim)
            if dim is None or not -leaf.dim() <= dim < leaf.dim():
                continue
            if first is None:
                first, self.length, dims[place] = leaf, leaf.shape[dim], dim
            elif owner in seq_dims:
                dims[place] = self._check(leaf, owner, dim)
            else:
                dims[place] = self._guess(leaf, first, owner)
        if first is None:
            raise UsageError(
                f"{self.name} was called without a tensor that has a dimension {self.seq_dim}, along which "
                "ContextParallel could divide a sequence. Write seq_dim= with the dimension of the "
                "sequence, or blocks={TransformerBlock} to select the modules that have one."
            )

    def _check(self, leaf: Tensor, owner: str, dim: int) -> int:
        if leaf.shape[dim] != self.length:
            raise UsageError(
                f"{owner} of {self.name} has shape {list(leaf.shape)}, whose dimension {dim} is not the "
                f"sequence of {self.length} positions. Write ContextParallel(seq_dims={{{owner!r}: None}}) "
                "if it has no sequence."
            )
        return dim

    def _guess(self, leaf: Tensor, first: Tensor, owner: str) -> Any:
        square = leaf.dim() >= 2 and leaf.shape[-2:] == (self.length, self.length)
        has = leaf.dim() > self.seq_dim and leaf.shape[self.seq_dim] == self.length
        plain = leaf.dim() == 3 and leaf.is_floating_point()  # (batch, sequence, features) of equal sizes
        if not square or plain or not (leaf.dtype is torch.bool or leaf.is_floating_point()):
            return self.seq_dim if has else None
        if has and leaf.shape == first.shape[: leaf.dim()]:
            raise UsageError(
                f"It is ambiguous whether {owner} of {self.name}, of shape {list(leaf.shape)}, is a mask "
                f"of {self.length} x {self.length} positions, or has a row for each sample. Write "
                f"ContextParallel(seq_dims={{{owner!r}: {self.seq_dim}}}) if it has the sequence in "
                f"dimension {self.seq_dim}, or None there if it is a mask."
            )
        return MASK

    def subsample(self, length: int, stir: bool = False) -> ShardedCall:
        """Return the call with `length` of the positions, without gradients; `stir` changes the values."""
        call = object.__new__(ShardedCall)
        call.__dict__.update(self.__dict__)
        call.length, call.leaves = length, []
        random = torch.Generator().manual_seed(length)
        kept = torch.randperm(self.length, generator=random)[:length].sort().values
        for number, (leaf, dim) in enumerate(zip(self.leaves, self.dims, strict=True)):
            if isinstance(leaf, torch.Tensor):
                leaf, places = leaf.detach(), kept.to(leaf.device)
                if dim == MASK:
                    leaf = leaf.index_select(-1, places).index_select(-2, places)
                elif dim is not None:
                    leaf = leaf.index_select(dim, places)
                    if stir and leaf.is_floating_point() and leaf.numel():
                        leaf = leaf + noise(leaf, number) * (0.1 + 0.5 * leaf.std(correction=0))
            call.leaves.append(leaf)
        call.whole = unflatten(call.leaves, call.spec, self.whole)
        return call

    def shard_arguments(self, exchange: SequenceExchange) -> Call:
        """Return the arguments with this rank's shard of the sequence."""
        local = []
        for leaf, dim in zip(self.leaves, self.dims, strict=True):
            if isinstance(leaf, torch.Tensor):
                leaf = exchange.replicate(leaf) if dim in (None, MASK) else exchange.shard(leaf, dim)
            local.append(leaf)
        call: Call = unflatten(local, self.spec, self.whole)
        return call

    def join(self, output: Any, exchange: SequenceExchange) -> Any:
        """Return the output for the full sequence, on all ranks.

        Raises:
            UsageError: A tensor in it has no dimension of the sequence.
        """
        leaves, spec = flatten(output)
        dim, size = self.seq_dim, exchange.part.size
        paths = iter_paths(output)
        for (path, leaf), place in zip(paths, range(len(leaves)), strict=True):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.dim() <= dim or leaf.shape[dim] != size:
                raise UsageError(
                    f"{self.name} returned a tensor of shape {list(leaf.shape)}"
                    f"{f' at output{path}' if path else ''}, which does not have this rank's {size} of "
                    f"{exchange.part.length} positions in dimension {dim}, so it cannot be gathered. Return "
                    "a tensor with the sequence (a loss per position, reduction='none'), and reduce it after "
                    "the model; or name the modules to shard with blocks={TransformerBlock}."
                )
            leaves[place] = exchange.join(leaf, dim)
        return unflatten(leaves, spec, output)


def noise(like: Tensor, seed: int) -> Tensor:
    """Return random numbers of a tensor's shape, the same for the same seed on all ranks."""
    random = torch.Generator(like.device).manual_seed(seed)
    made = torch.randn(like.shape, generator=random, device=like.device, dtype=torch.float32)
    return made.to(like.dtype)


def _names(forward: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the function's first `count` parameters."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[place] if place < len(names) else f"argument {place}" for place in range(count)]
