"""`KeptParts`: between forward and backward a rank keeps its part of keys and values, not those of all."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.torch_internals import packs_saved_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from fabric.strategies.layouts.context.exchange import Exchange


class KeptParts:
    """Hooks on what attention saves for its backward: whole tensors are collected once more there.

    Args:
        exchange: The ranks, which all run the backward.
        own: This rank's parts.
        whole: What was made of them.
        dim: Of the sequence.
    """

    def __init__(self, exchange: Exchange, own: list[Tensor], whole: list[Tensor], dim: int) -> None:
        self._exchange, self._dim = exchange, dim
        self._own = [tensor.detach() for tensor in own]
        self._makers: dict[int, Callable[[], Tensor]] = {
            _address(tensor): partial(self._whole, place) for place, tensor in enumerate(whole)
        }
        self._packed = self._left = 0
        self._again: list[Tensor] = []

    def context(self) -> AbstractContextManager[Any]:
        """Around attention. Does nothing where activations are computed again, which keeps nothing at all."""
        if not torch.is_grad_enabled() or packs_saved_tensors():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @contextmanager
    def making(self, tensor: Any, make: Callable[[], Any]) -> Iterator[Any]:
        """Context in which `tensor`, if it has memory of its own, is made again rather than kept."""
        address = _address(tensor) if type(tensor) is torch.Tensor else None
        if address is not None:
            self._makers[address] = make
        yield tensor
        if address is not None:  # its memory may now be that of another
            del self._makers[address]

    def _pack(self, tensor: Tensor) -> tuple[Any, ...]:
        make = self._makers.get(_address(tensor)) if tensor.numel() else None
        if make is None:
            return tensor.detach(), tensor._version
        self._packed += isinstance(make, partial) and make.func == self._whole
        return make, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: tuple[Any, ...]) -> Tensor:
        if len(packed) == 2:
            tensor, version = packed
            if tensor._version != version:
                raise UsageError(
                    f"A tensor of shape {list(tensor.shape)} that attention needs for its backward was "
                    "changed in place after it. Write x = x + y in place of x += y."
                )
            kept: Tensor = tensor
            return kept
        make, size, stride, offset = packed
        again: Tensor = make().as_strided(size, stride, offset)
        return again

    def _whole(self, place: int) -> Tensor:
        """One of the whole tensors; they are let go when all that was packed has come for them."""
        if not self._again:
            self._again, self._left = self._exchange.gather(self._own, self._dim), self._packed
        whole = self._again[place]
        self._left -= 1
        if not self._left:
            self._again = []
        return whole


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
