"""`Stage`: the blocks of one rank, and what happens to one micro-batch in them. Sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten, iter_paths, map_tree, unflatten
from fabric.strategies.trial import kept_buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

CHECKPOINT = ("always", "except_last", "never")
"""Which micro-batches compute their activations again in backward."""


class Stage:
    """Consecutive blocks of a model.

    Args:
        index: Of this stage.
        count: Of all stages.
        blocks: (path in the model, block), in the order of the forward.
        first: Number of the first one among all blocks.
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
        """Whether the user's input comes here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the user's output comes from here."""
        return self.index == self.count - 1

    @property
    def name(self) -> str:
        """For messages: `stage 1 (blocks 3 to 5)`."""
        last = self.first + len(self.blocks) - 1
        return f"stage {self.index} (block{f's {self.first} to {last}' if last > self.first else f' {last}'})"

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], at_once: bool) -> Any:
        """The output for one micro-batch.

        Args:
            args: What the first block is called with.
            kwargs: Its keyword arguments.
            at_once: Whether it goes back right after, so that nothing is saved by computing it again.

        Raises:
            UsageError: The output is no tree of tensors.
        """
        saves = self._checkpoint == "always" or (self._checkpoint == "except_last" and not at_once)
        if saves and torch.is_grad_enabled() and any([block.training for _, block in self.blocks]):
            from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

            # To its end: an operation that fills what it has saved (RReLU) would be left before it has.
            with set_checkpoint_early_stop(False):
                out = checkpoint(self._made_again(), *args, use_reentrant=False, **kwargs)
        else:
            out = self._chain(*args, **kwargs)
        for path, leaf in iter_paths(out):
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise UsageError(
                    f"{self._last_name()} returned {type(leaf).__name__} ({leaf!r:.60}){_at(path)}, which "
                    "cannot go on to the next stage of the pipeline. Return tensors, or tuples, lists, "
                    "dictionaries and dataclasses of tensors."
                )
        return out

    def _chain(self, *args: Any, **kwargs: Any) -> Any:
        (_, block), *rest = self.blocks
        out = block(*args, **kwargs)
        for _, block in rest:
            out = block(out)
        return out

    def _made_again(self) -> Callable[..., Any]:
        """Return the chain; from its second call on with the default dtype of the first, and buffers stay."""
        dtypes: list[torch.dtype] = []
        named = [pair for path, block in self.blocks for pair in block.named_parameters(path)]
        before = [_state(p) for _, p in named]

        def chain(*args: Any, **kwargs: Any) -> Any:
            # The first block may change its input in place, which is needed once more.
            args, kwargs = map_tree(_copy, (args, kwargs))
            dtypes.append(outside := torch.get_default_dtype())
            if len(dtypes) == 1:
                return self._chain(*args, **kwargs)
            if changed := [
                name for (name, p), state in zip(named, before, strict=True) if _state(p) != state
            ]:
                raise UsageError(
                    f"{changed[0]} was changed between the forward and the backward, which computes "
                    "activations again: gradients would be those at other weights. Change weights after "
                    'fabric.backward(loss), or write PipelineStrategy(checkpoint="never").'
                )
            torch.set_default_dtype(dtypes[0])
            try:
                with kept_buffers(self.modules):
                    return self._chain(*args, **kwargs)
            finally:
                torch.set_default_dtype(outside)

        return chain

    def _last_name(self) -> str:
        path, block = self.blocks[-1]
        return f"Block {self.first + len(self.blocks) - 1} ({path}, a {type(block).__name__})"


class _Own(torch.autograd.Function):
    """The received tensor as no leaf: a block may change it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def own(tree: Any) -> Any:
    """A tree whose tensors that require gradients are no leaves of autograd."""
    leaves, spec = flatten(tree)
    wants = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    if not any(wants):
        return tree
    apply: Any = _Own.apply
    made = [apply(leaf) if wanted else leaf for leaf, wanted in zip(leaves, wants, strict=True)]
    return unflatten(made, spec, tree)


def _state(parameter: Tensor) -> tuple[int, int]:
    """Return what differs once the parameter's values were replaced or changed in place."""
    return parameter.data_ptr(), parameter._version


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _at(path: str) -> str:
    return f" at output{path}" if path else ""
