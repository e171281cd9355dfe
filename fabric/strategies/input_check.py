"""`InputConsistencyCheck`: compares the inputs of ranks that must be called with the same data."""

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
"""Number of calls with gradients in which values are compared; later calls compare shapes only."""
_CHECKSUM_ELEMENTS = 1 << 16


class InputConsistencyCheck:
    """A check before each call of one model that all ranks of a row pass the same inputs.

    Args:
        channel: The ranks that need the same data.
        number: Index of the model in the order of setup: ranks must call the same model.
        name: Class name of the model, for errors.
    """

    def __init__(self, channel: Channel, number: int, name: str) -> None:
        self._channel, self._name = channel, f"model {number} ({name})"
        self._compared = 0

    def compare(self, verb: str, leaves: list[Any], spec: Spec) -> None:
        """Compare structure, shapes and dtypes of the arguments. All ranks of the channel must call this.

        Values are compared in the first calls, and in each call without gradients: evaluation loops of ranks
        may have different numbers of batches.

        Raises:
            CollectiveMismatch: They differ; raised on all ranks.
        """
        trains = torch.is_grad_enabled()
        texts = [describe_tensor(v) if isinstance(v, torch.Tensor) else type(v).__name__ for v in leaves]
        what = format_tree(spec, texts)
        if self._compared < _COMPARED or not trains:
            self._compared += trains
            what = f"{what}{CONTENTS}{_checksum(leaves)}"
        self._channel.check_call(call_of(f"{verb} of {self._name}{'' if trains else ', no_grad'}", what))


def _checksum(leaves: list[Any]) -> str:
    """Return a checksum of the first elements of each tensor, which are copied to the host."""
    value = 0
    for leaf in leaves:
        plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.grad_fn is None
        # Floats computed on different GPUs may differ in the last bit.
        if plain and (leaf.device.type == "cpu" or not leaf.is_floating_point()):
            head = leaf.detach().reshape(-1)[:_CHECKSUM_ELEMENTS].cpu()
            value = zlib.crc32(as_bytes(head).numpy().tobytes(), value)
    return f"{value:08x}"
