"""Sharding and gathering of tensors along the sequence, with gradients.

All ranks of a row compute one loss. Inside of a region a rank has the gradient of its shard only, which is
multiplied by `count`: DDP and FSDP2 average gradients over ranks, so the mean is the sum over shards.
Gradients that are equal on all ranks are unchanged by the mean.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabric.collectives.channel import Channel
    from fabric.strategies.context_parallel.sequence import SequenceShard

    TensorsFunction = Callable[[list[Tensor]], list[Tensor]]


class SequenceExchange:
    """Communication between the ranks that share a sequence. All of them must make each call.

    Args:
        channel: The group of these ranks.
        part: This rank's shard.
    """

    def __init__(self, channel: Channel, part: SequenceShard) -> None:
        self.channel, self.part = channel, part

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a tensor that is equal on all ranks."""
        (local,) = _exchange([whole], partial(self._take, dim=dim), partial(self._average, dim=dim))
        return local

    def replicate(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is equal on all ranks, for use in a region: its gradient is averaged."""
        (shared,) = _exchange([tensor], _views, self._mean)
        return shared

    def join(self, own: Tensor, dim: int) -> Tensor:
        """Return the full tensor of which each rank has a shard, for use outside of the region."""
        (joined,) = _exchange([own], partial(self.gather, dim=dim), partial(self._multiply, dim=dim))
        return joined

    def all_gather(self, own: list[Tensor], dim: int) -> list[Tensor]:
        """Return full tensors for use inside of the region: gradients are summed over ranks."""
        return _exchange(own, partial(self.gather, dim=dim), partial(self.sum_parts, dim=dim))

    def gather(self, own: list[Tensor], dim: int) -> list[Tensor]:
        """Return the full tensors, without gradients."""
        return [self._gathered(tensor.detach().movedim(dim, 0), dim) for tensor in own]

    def sum_parts(self, whole: list[Tensor], dim: int) -> list[Tensor]:
        """Return this rank's shards of the sums over ranks (reduce-scatter)."""
        return [self._summed(tensor.movedim(dim, 0)).movedim(0, dim) for tensor in whole]

    def _gathered(self, own: Tensor, dim: int) -> Tensor:
        """All-gather a tensor whose first dimension is the sequence; the result has it in `dim`."""
        sizes = self.part.sizes
        padded = _padded(own, max(sizes))
        ready = self.channel.transport.to_staging(_bools_as_bytes(padded))
        room = ready.new_empty(len(sizes) * ready.numel())
        self.channel.collective.start_all_gather_flat(room, ready.reshape(-1)).wait()
        parts = room.to(own.device).view(own.dtype).view(len(sizes), *padded.shape)
        return self._in_order([part[:size] for part, size in zip(parts, sizes, strict=True)], dim)

    def _summed(self, whole: Tensor) -> Tensor:
        """Reduce-scatter a tensor whose first dimension is the sequence."""
        most, each = max(self.part.sizes), []
        for pair in self.part.spans:
            taken = torch.cat([whole[start:end] for start, end in pair])
            each.append(self.channel.transport.to_staging(_padded(taken, most).contiguous()))
        own = torch.empty_like(each[0])
        self.channel.collective.reduce_scatter(own, each)
        return own.to(whole.device)[: self.part.size]

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the means over ranks, as new tensors."""
        ready = [
            self.channel.transport.to_staging(t.clone(memory_format=torch.contiguous_format)) for t in tensors
        ]
        for tensor in ready:
            self.channel.collective.all_reduce(tensor)
        return [r.to(t.device).div_(self.part.count) for r, t in zip(ready, tensors, strict=True)]

    def _take(self, whole: list[Tensor], dim: int) -> list[Tensor]:
        return [self.part.shard_of(tensor, dim) for tensor in whole]

    def _average(self, own: list[Tensor], dim: int) -> list[Tensor]:
        return [tensor.div_(self.part.count) for tensor in self.gather(own, dim)]

    def _multiply(self, whole: list[Tensor], dim: int) -> list[Tensor]:
        return [tensor.mul_(self.part.count) for tensor in self._take(whole, dim)]

    def _in_order(self, parts: list[Tensor], dim: int) -> Tensor:
        """Concatenate the shards of all ranks, whose first dimension is the sequence, along `dim`."""
        pieces: list[tuple[int, Tensor]] = []
        for tensor, pair in zip(parts, self.part.spans, strict=True):
            lengths = [end - start for start, end in pair]
            pieces += [(start, piece) for (start, _), piece in zip(pair, tensor.split(lengths), strict=True)]
        pieces.sort(key=lambda pair: pair[0])
        return torch.cat([piece.movedim(0, dim) for _, piece in pieces], dim)


class _Exchange(torch.autograd.Function):
    """`forward` of as many tensors; `back` of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, forward: TensorsFunction, back: TensorsFunction, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(forward(list(tensors)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needed = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        found: list[Any] = [None] * len(grads)
        for i, grad in zip(needed, ctx.back([grads[i] for i in needed]), strict=True):
            found[i] = grad
        return None, None, *found


def _exchange(tensors: list[Tensor], forward: TensorsFunction, back: TensorsFunction) -> list[Tensor]:
    if not (torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])):
        return forward(tensors)
    return list(_Exchange.apply(forward, back, *tensors))  # type: ignore[no-untyped-call]


def _views(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.view_as(tensor) for tensor in tensors]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _bools_as_bytes(flat: Tensor) -> Tensor:
    """Return bools as bytes, which all backends support."""
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat
