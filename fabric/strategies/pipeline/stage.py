"""`Stage`: the blocks of one rank, and their forward for one micro-batch. No communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten, iter_paths, map_tree, unflatten
from fabric.strategies.trial import preserve_buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

CHECKPOINT = ("always", "except_last", "never")
"""Choices of the micro-batches that recompute their activations in backward."""


class Stage:
    """Consecutive blocks of a model.

    Args:
        index: Index of this stage.
        count: Number of stages.
        blocks: (path in the model, block), in the order of the forward.
        first: Index of its first block among all blocks.
        checkpoint: One of `CHECKPOINT`.
    """

    def __init__(
        self, index: int, count: int, blocks: list[tuple[str, Module]], first: int, checkpoint: str
    ) -> None:
        self.index, self.count, self.blocks, self.first = index, count, blocks, first
        self._checkpoint = checkpoint
        self.modules = list(dict.fromkeys([m for _, block in blocks for m in block.modules()]))

    @property
    def is_first(self) -> bool:
        """Whether this stage is called with the user's input."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the model's output."""
        return self.index == self.count - 1

    @property
    def name(self) -> str:
        """Name for error messages: `stage 1 (blocks 3 to 5)`."""
        last = self.first + len(self.blocks) - 1
        return f"stage {self.index} (block{f's {self.first} to {last}' if last > self.first else f' {last}'})"

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], backward_follows: bool) -> Any:
        """Return the output for one micro-batch.

        Args:
            args: Positional arguments of the first block.
            kwargs: Its keyword arguments.
            backward_follows: Whether its backward is the next action, so that checkpointing saves no memory.

        Raises:
            UsageError: The output is no tree of tensors.
        """
        recompute = self._checkpoint == "always"
        recompute |= self._checkpoint == "except_last" and not backward_follows
        if recompute and torch.is_grad_enabled() and any([block.training for _, block in self.blocks]):
            from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

            # No early stop: RReLU writes into a tensor after saving it, and must run to its end.
            with set_checkpoint_early_stop(False):
                out = checkpoint(self._recomputable(), *args, use_reentrant=False, **kwargs)
        else:
            out = self._chain(*args, **kwargs)
        for path, leaf in iter_paths(out):
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise UsageError(
                    f"{self._last_name()} returned {type(leaf).__name__} ({leaf!r:.60}){_at(path)}, which "
                    "cannot be sent to another stage of the pipeline. Return tensors, or tuples, lists, "
                    "dictionaries and dataclasses of tensors."
                )
        return out

    def _chain(self, *args: Any, **kwargs: Any) -> Any:
        (_, block), *rest = self.blocks
        out = block(*args, **kwargs)
        for _, block in rest:
            out = block(out)
        return out

    def _recomputable(self) -> Callable[..., Any]:
        """Return the forward of all blocks. From its second call on it is a recomputation: the default dtype
        is that of the first call, and buffers keep their values.
        """
        dtypes: list[torch.dtype] = []
        named = [pair for path, block in self.blocks for pair in block.named_parameters(path)]
        before = [_version(p) for _, p in named]

        def chain(*args: Any, **kwargs: Any) -> Any:
            # Copies: the first block may change its input in place, and the recomputation needs it.
            args, kwargs = map_tree(_copy, (args, kwargs))
            dtypes.append(outside := torch.get_default_dtype())
            if len(dtypes) == 1:
                return self._chain(*args, **kwargs)
            if changed := [
                name for (name, p), state in zip(named, before, strict=True) if _version(p) != state
            ]:
                raise UsageError(
                    f"{changed[0]} was changed between the forward and the backward. The backward recomputes "
                    "activations, so gradients would be those at other weights. Change weights after "
                    'fabric.backward(loss), or write PipelineStrategy(checkpoint="never").'
                )
            torch.set_default_dtype(dtypes[0])
            try:
                with preserve_buffers(self.modules):
                    return self._chain(*args, **kwargs)
            finally:
                torch.set_default_dtype(outside)

        return chain

    def _last_name(self) -> str:
        path, block = self.blocks[-1]
        return f"Block {self.first + len(self.blocks) - 1} ({path}, a {type(block).__name__})"


class _AsNonLeaf(torch.autograd.Function):
    """Identity whose result is no leaf of autograd, so that a block may change it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def as_non_leaves(tree: Any) -> Any:
    """Return the tree with tensors that require gradients replaced by non-leaf tensors of autograd."""
    leaves, spec = flatten(tree)
    needs_grad = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    if not any(needs_grad):
        return tree
    apply: Any = _AsNonLeaf.apply
    result = [apply(leaf) if needed else leaf for leaf, needed in zip(leaves, needs_grad, strict=True)]
    return unflatten(result, spec, tree)


def _version(parameter: Tensor) -> tuple[int, int]:
    """Return a value that changes when the parameter's values are replaced or changed in place."""
    return parameter.data_ptr(), parameter._version


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _at(path: str) -> str:
    return f" at output{path}" if path else ""
