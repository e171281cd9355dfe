"""`InputConsistencyCheck`: ranks that compute one thing together compare what they were called with."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from fabric.collectives.frames import CONTENTS, call_of, describe_tensor, format_tree
from fabric.precision.dtypes import as_bytes

if TYPE_CHECKING:
    from fabric.collectives.channel import Channel
    from fabric.core.tree import Spec

_COMPARED = 2
"""Calls with gradients in which ranks compare what is in their batches; later ones compare shapes."""
_LOOKED_AT = 1 << 16


class InputConsistencyCheck:
    """Meets the other ranks of a row before each call of one model.

    Args:
        channel: The ranks that need the same data.
        number: Of the model among those set up: ranks that call different ones compute different things.
        name: Of the model, for messages.
    """

    def __init__(self, channel: Channel, number: int, name: str) -> None:
        self._channel, self._name = channel, f"model {number} ({name})"
        self._compared = 0

    def compare(self, verb: str, leaves: list[Any], spec: Spec) -> None:
        """Compare structure, shapes and dtypes of the arguments; in the first calls also what is in them.

        And in each call without gradients: there loops of ranks may have other numbers of batches.

        Raises:
            CollectiveMismatch: They differ; raised on all ranks.
        """
        trains = torch.is_grad_enabled()
        drawn = [describe_tensor(v) if isinstance(v, torch.Tensor) else type(v).__name__ for v in leaves]
        what = format_tree(spec, drawn)
        if self._compared < _COMPARED or not trains:
            self._compared += trains
            what = f"{what}{CONTENTS}{_checksum(leaves)}"
        self._channel.check_call(call_of(f"{verb} of {self._name}{'' if trains else ', no_grad'}", what))


def _checksum(leaves: list[Any]) -> str:
    """Return a checksum of the first elements of each tensor; copies them to the host."""
    value = 0
    for leaf in leaves:
        plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.grad_fn is None
        # What was computed on a GPU may differ in the last bit.
        if plain and (leaf.device.type == "cpu" or not leaf.is_floating_point()):
            some = leaf.detach().reshape(-1)[:_LOOKED_AT].cpu()
            value = zlib.crc32(as_bytes(some).numpy().tobytes(), value)
    return f"{value:08x}"
