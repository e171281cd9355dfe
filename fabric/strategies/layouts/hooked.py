"""What layouts share that synchronise: outputs that notice a backward, and rank zero's values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.core.torch_internals import foreach_copy_
from fabric.forward import anchor, differentiable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

BUCKET, ALONE = 25 * 2**20, 2**20
"""Bytes of small tensors in one message; and from which on a tensor travels alone, without a copy."""


class HookedCall:
    """A forward or bound method whose outputs tell the layout when a backward reaches them.

    Buffers are sent at the end of a backward pass, where all ranks are. DDP sends them before each forward,
    evaluation included; like this an evaluation forward makes no collective and ranks agree during it.
    """

    __slots__ = ("call", "layout", "replica")

    def __init__(self, call: Callable[..., Any], layout: Any, replica: Module) -> None:
        self.call = call
        self.layout = layout
        self.replica = replica

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; one hook for each output that a backward may start from."""
        out = self.call(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            one = type(out) is torch.Tensor and out.grad_fn is not None
            for leaf in (out,) if one else differentiable(out):
                if leaf.grad_fn is not None:
                    (leaf if leaf._base is None else anchor(leaf)).register_hook(self._reached)
        return out

    def _reached(self, grad: Tensor) -> None:
        self.layout.on_reached(self.replica)

    def __getattr__(self, name: str) -> Any:
        if name in HookedCall.__slots__:  # not set yet, while copying
            raise AttributeError(name)
        return getattr(self.call, name)


def broadcast_from_zero(tensors: list[Tensor]) -> None:
    """Rank zero's values in `tensors` on all ranks, in few messages per dtype. All ranks must call this.

    Writes through `.data`: batch norm saves its running statistics for backward, and a counted in-place
    change between a forward and a later backward would make autograd refuse that.
    """
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= ALONE and tensor.is_contiguous():
            dist.broadcast(tensor.data, 0)
        elif tensor.numel():
            small.setdefault(tensor.dtype, []).append(tensor.data)
    for group in small.values():
        while group:
            taken, size = 0, 0
            while taken < len(group) and (taken == 0 or size + group[taken].nbytes <= BUCKET):
                size += group[taken].nbytes
                taken += 1
            bucket, group[:taken] = group[:taken], []
            flat = torch.cat([b.reshape(-1) for b in bucket])
            dist.broadcast(flat, 0)
            parts = flat.split([b.numel() for b in bucket])
            foreach_copy_(bucket, [part.view(b.shape) for part, b in zip(parts, bucket, strict=True)])
