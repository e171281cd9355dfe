"""Tensors of which each rank has a part along the sequence: made whole, and divided, with gradients.

All ranks of a row compute one loss. Inside the divided region a rank has the gradient of its own part only.
It is multiplied by `count` there: DDP and FSDP2 average gradients over ranks, and the mean is then the sum
over parts. Gradients that are equal on all ranks are unchanged by the mean.
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
    from fabric.strategies.context_parallel.sequence import SequencePart

    Passage = Callable[[list[Tensor]], list[Tensor]]


class SequenceExchange:
    """The ranks that share a sequence, and which part of it is whose. All of them make each call.

    Args:
        channel: Their group.
        part: Of this rank.
    """

    def __init__(self, channel: Channel, part: SequencePart) -> None:
        self.channel, self.part = channel, part

    def divide(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that all ranks have whole."""
        (divided,) = _passed([whole], partial(self._take, dim=dim), partial(self._average, dim=dim))
        return divided

    def share(self, alike: Tensor) -> Tensor:
        """A tensor that is alike on all ranks, for use in what is divided: only its gradient changes."""
        (shared,) = _passed([alike], _views, self._mean)
        return shared

    def join(self, own: Tensor, dim: int) -> Tensor:
        """The whole of what each rank has its part of, on all ranks, which go on alike."""
        (joined,) = _passed([own], partial(self.gather, dim=dim), partial(self._multiply, dim=dim))
        return joined

    def see(self, own: list[Tensor], dim: int) -> list[Tensor]:
        """The whole of tensors, of which each rank makes a use of its own: gradients are summed."""
        return _passed(own, partial(self.gather, dim=dim), partial(self.sum_parts, dim=dim))

    def gather(self, own: list[Tensor], dim: int) -> list[Tensor]:
        """The whole of tensors, without gradients."""
        return [self._gathered(tensor.detach().movedim(dim, 0), dim) for tensor in own]

    def sum_parts(self, whole: list[Tensor], dim: int) -> list[Tensor]:
        """Return this rank's parts of the sums over ranks, of tensors that each rank has whole."""
        return [self._summed(tensor.movedim(dim, 0)).movedim(0, dim) for tensor in whole]

    def _gathered(self, own: Tensor, dim: int) -> Tensor:
        """The whole of a tensor that has the sequence first; it then has it in `dim`."""
        sizes = self.part.sizes
        padded = _padded(own, max(sizes))
        ready = self.channel.transport.to_staging(_as_numbers(padded))
        room = ready.new_empty(len(sizes) * ready.numel())
        self.channel.collective.start_all_gather_flat(room, ready.reshape(-1)).wait()
        parts = room.to(own.device).view(own.dtype).view(len(sizes), *padded.shape)
        return self._in_order([part[:size] for part, size in zip(parts, sizes, strict=True)], dim)

    def _summed(self, whole: Tensor) -> Tensor:
        """This rank's part of the sum, of a tensor that has the sequence first."""
        most, each = max(self.part.sizes), []
        for pair in self.part.spans:
            taken = torch.cat([whole[start:end] for start, end in pair])
            each.append(self.channel.transport.to_staging(_padded(taken, most).contiguous()))
        own = torch.empty_like(each[0])
        self.channel.collective.reduce_scatter(own, each)
        return own.to(whole.device)[: self.part.size]

    def _mean(self, alike: list[Tensor]) -> list[Tensor]:
        """The means over ranks, as new tensors."""
        ready = [
            self.channel.transport.to_staging(t.clone(memory_format=torch.contiguous_format)) for t in alike
        ]
        for tensor in ready:
            self.channel.collective.all_reduce(tensor)
        return [r.to(t.device).div_(self.part.count) for r, t in zip(ready, alike, strict=True)]

    def _take(self, whole: list[Tensor], dim: int) -> list[Tensor]:
        return [self.part.take(tensor, dim) for tensor in whole]

    def _average(self, own: list[Tensor], dim: int) -> list[Tensor]:
        return [tensor.div_(self.part.count) for tensor in self.gather(own, dim)]

    def _multiply(self, whole: list[Tensor], dim: int) -> list[Tensor]:
        return [tensor.mul_(self.part.count) for tensor in self._take(whole, dim)]

    def _in_order(self, parts: list[Tensor], dim: int) -> Tensor:
        """Every rank's part, which has the sequence first, as one tensor that has it in `dim`."""
        pieces: list[tuple[int, Tensor]] = []
        for tensor, pair in zip(parts, self.part.spans, strict=True):
            lengths = [end - start for start, end in pair]
            pieces += [(start, piece) for (start, _), piece in zip(pair, tensor.split(lengths), strict=True)]
        pieces.sort(key=lambda pair: pair[0])
        return torch.cat([piece.movedim(0, dim) for _, piece in pieces], dim)


class _Passing(torch.autograd.Function):
    """`there` of as many tensors; `back` of their gradients."""

    @staticmethod
    def forward(ctx: Any, there: Passage, back: Passage, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(there(list(tensors)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        found: list[Any] = [None] * len(grads)
        for i, grad in zip(wanted, ctx.back([grads[i] for i in wanted]), strict=True):
            found[i] = grad
        return None, None, *found


def _passed(tensors: list[Tensor], there: Passage, back: Passage) -> list[Tensor]:
    if not (torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])):
        return there(tensors)
    return list(_Passing.apply(there, back, *tensors))  # type: ignore[no-untyped-call]


def _views(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.view_as(tensor) for tensor in tensors]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _as_numbers(flat: Tensor) -> Tensor:
    """Truth values as bytes, which every backend sends."""
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat
