"""Norms of gradients: computed and applied in few kernels, with an error for norms that are not finite.

Called by layouts. No function synchronises the host with the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.core._torch import foreach_mul_, foreach_norm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class FiniteNorms:
    """The check of the norms that clipping returns: an error for one that is not finite.

    A norm on the host is checked at once. Reading a norm on a device would make the host wait for the device,
    and then the device for the host. So it is copied asynchronously, and checked in the next call or before
    the next save. The call that raises does not depend on timing, so all ranks raise in the same call.
    """

    def __init__(self) -> None:
        self._pending: tuple[Tensor, Any, float, str] | None = None

    def check(self, norm: Tensor, norm_type: float) -> None:
        """Check `norm`, or copy it for a later check; check the pending one.

        Raises:
            RuntimeError: One of them is not finite.
        """
        self.check_pending()
        if norm.device.type in ("cpu", "mps"):  # mps: torch has no pinned memory for it
            value = norm.item()
            if not math.isfinite(value):
                raise RuntimeError(_describe(norm_type, value) + ", so they cannot be clipped. " + _FIX)
            return
        from fabric.core.source import user_line

        copy = torch.empty((), dtype=norm.dtype, pin_memory=True).copy_(norm.detach(), non_blocking=True)
        event = torch.Event(norm.device)
        event.record(torch.accelerator.current_stream(norm.device))
        self._pending = copy, event, norm_type, user_line()

    def check_pending(self) -> None:
        """Check the last norm on a device, if it was not checked yet.

        Raises:
            RuntimeError: It is not finite.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        copy, event, norm_type, line = pending
        if not event.query():
            event.synchronize()
        value = copy.item()
        if not math.isfinite(value):
            raise RuntimeError(
                f"{_describe(norm_type, value)}. They were clipped in the call before this one ({line}): "
                "norms on a device are checked one call later, so that the host does not wait. Steps since "
                f"then made parameters NaN. Load a checkpoint from before that call. {_FIX}"
            )


_FIX = "Pass error_if_nonfinite=False to scale them by it anyway."


def _describe(norm_type: float, value: float) -> str:
    return f"The total norm of order {norm_type} of the gradients of the whole model is {value} (non-finite)"


def norm_over_ranks(shards: list[tuple[list[Tensor], list[Any]]], norm_type: float, staging: Any) -> Tensor:
    """Return the norm of tensors that are distributed over ranks. All ranks of the groups must call this.

    Args:
        shards: This rank's tensors, each list with the groups whose ranks hold the other tensors or shards.
            The groups must be the same on all ranks.
        norm_type: Order of the norm.
        staging: Device from which messages are sent.
    """
    from fabric.collectives.ordered import from_ordered, to_ordered

    infinite = math.isinf(norm_type)
    wide = torch.float32 if torch.device(staging).type == "mps" else torch.float64
    powers = []
    for tensors, groups in shards:
        nonempty = [tensor.detach() for tensor in tensors if tensor.numel()]
        exact = torch.float64 if any([t.dtype == torch.float64 for t in nonempty]) else torch.float32
        each = (
            torch.stack(foreach_norm(nonempty, norm_type, dtype=exact))
            if nonempty
            else torch.zeros(1, device=staging)
        )
        each = each.to(staging, wide)
        power = each.max() if infinite else each.pow(norm_type).sum()
        if infinite:  # the maximum of some backends ignores NaN
            power = to_ordered(power, largest=True)
        for group in groups:
            dist.all_reduce(power, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        powers.append(from_ordered(power, wide) if infinite else power)
    total = torch.stack(powers)
    return total.max() if infinite else total.sum().pow(1.0 / norm_type)


def scale_(tensors: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale tensors whose total norm is `norm` to one of at most `max_norm`, in place."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for (dtype, device, _), group in group_by_dtype_device(tensors).items():
        foreach_mul_(group, scale.to(device, dtype))


def group_by_dtype_device(
    tensors: Iterable[Tensor],
) -> dict[tuple[torch.dtype, torch.device, torch.layout], list[Tensor]]:
    """Return the tensors grouped so that one foreach kernel can process each group."""
    groups: dict[tuple[torch.dtype, torch.device, torch.layout], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device, tensor.layout), []).append(tensor)
    return groups
