"""What a rank keeps of other stages' blocks: names and shapes, and an error for those who call them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn import Parameter

from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Module


class Slots:
    """Where the tensors of a model's blocks are, by block; told apart by what was there at first.

    Tensors on the meta device are replaced when they get values, so only what was there at first says which
    ones are the same.

    Args:
        blocks: All blocks.
        own: Numbers of those that this stage holds.
    """

    def __init__(self, blocks: list[Module], own: set[int]) -> None:
        self._blocks = [list(_slots(block)) for block in blocks]
        self._kept = {key for number in own for _, _, key in self._blocks[number]}
        uses = Counter([key for slots in self._blocks for key in {key for _, _, key in slots}])
        self._shared = {key for key, count in uses.items() if count > 1}
        self._ghosts: dict[int, Any] = {}

    def shared(self, number: int) -> list[Any]:
        """The tensors of a block that another one has, too."""
        return [slots[name] for slots, name, key in self._blocks[number] if key in self._shared]

    def leave(self, number: int, shared: bool = False) -> None:
        """Put tensors without memory in the place of a block's that this stage does not hold.

        Args:
            number: Of the block.
            shared: Those that another block has, too; else the others.
        """
        for slots, name, key in self._blocks[number]:
            if key in self._kept or (key in self._shared) != shared:
                continue
            tensor = slots[name]
            if key not in self._ghosts:
                made: Any = torch.empty_like(tensor, device="meta", requires_grad=False)
                self._ghosts[key] = (
                    Parameter(made, tensor.requires_grad) if isinstance(tensor, Parameter) else made
                )
            slots[name] = self._ghosts[key]


def _slots(block: Module) -> Iterator[tuple[dict[str, Any], str, int]]:
    for module in block.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    yield slots, name, id(tensor)


class _Refusal:
    """A forward pre-hook that raises."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, module: Module, args: Any) -> NoReturn:
        raise UsageError(self.text)


def refuse_calls(block: Module, name: str, stage: int, rank: int, here: int) -> None:
    """Let a call of the block raise: it is not on this stage."""
    block.register_forward_pre_hook(
        _Refusal(
            f"{name} is on stage {stage} (rank {rank}) of the pipeline, and this is stage {here}: it has no "
            "values here. Call the model itself, model(x), on all ranks."
        ),
        prepend=True,
    )
