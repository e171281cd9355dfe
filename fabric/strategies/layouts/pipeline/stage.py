"""`Stage`: the blocks of one rank, and what happens to one micro-batch in them. Sends nothing."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten, iter_paths, map_tree, unflatten
from fabric.utilities.seed import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], last: bool) -> Any:
        """The output for one micro-batch.

        Args:
            args: What the first block is called with.
            kwargs: Its keyword arguments.
            last: Whether it is the last micro-batch of the step.

        Raises:
            UsageError: The output is no tree of tensors.
        """
        again = self._checkpoint == "always" or (self._checkpoint == "except_last" and not last)
        if again and torch.is_grad_enabled() and any([block.training for _, block in self.blocks]):
            from torch.utils.checkpoint import checkpoint

            out = checkpoint(self._chain_of_copies, *args, use_reentrant=False, **kwargs)
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

    def _chain_of_copies(self, *args: Any, **kwargs: Any) -> Any:
        # The first block may change its input in place, which is needed once more.
        args, kwargs = map_tree(_copy, (args, kwargs))
        return self._chain(*args, **kwargs)

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


class RandomStream:
    """The random numbers of one stage. Every rank of a pipeline draws alike outside of its stages.

    What a stage draws is a function of its number and of the global generators, which are as before
    afterwards; if any stage has drawn, they go one step on, on all ranks alike.

    Args:
        stage: Number of the stage.
        device: Whose generators are meant, beside those of the host.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage, self._generators = stage, [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._fresh: list[Tensor] = []
        self.drawn = False
        """Whether this stage, or one that it has heard of, has drawn."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the generators are the stage's."""
        before = [generator.get_state() for generator in self._generators]
        self.drawn = False
        base = zlib.crc32(b"".join([state.numpy().tobytes() for state in before]))
        for place, generator in enumerate(self._generators):
            generator.manual_seed(derive_seed(base, self._stage, place) & (2**63 - 1))
        self._fresh = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)

    def look(self) -> bool:
        """Whether anything has been drawn so far, here or where `heard` knows of."""
        if not self.drawn:
            now = [generator.get_state() for generator in self._generators]
            self.drawn = not all(
                [torch.equal(one, other) for one, other in zip(now, self._fresh, strict=True)]
            )
        return self.drawn

    def go_on(self) -> None:
        """After the context: one step, if any stage has drawn."""
        if self.drawn:
            for generator in self._generators:
                torch.rand(1, generator=generator, device=generator.device)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _at(path: str) -> str:
    return f" at output{path}" if path else ""
