"""Norms of gradients: made and applied in few kernels, and an error for those that are not finite.

Called by layouts. Lets the host wait for no device.
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
    """The check of the norms that clipping gives: an error for one that is not finite.

    On the host at once. To look at a norm of a device, the host would wait for all that the device has still
    to do, and the device then for the host. So it is looked at when the next one comes, or something is
    saved: the device has then come to it, or has a whole step more to do. Which call raises does not depend
    on time, so all ranks raise in the same one.
    """

    def __init__(self) -> None:
        self._late: tuple[Tensor, Any, float, str] | None = None

    def check(self, norm: Tensor, norm_type: float) -> None:
        """Look at `norm`, now or later, and at the one before.

        Raises:
            RuntimeError: One of them is not finite.
        """
        self.look()
        if norm.device.type in ("cpu", "mps"):  # mps: torch has no pinned memory of it
            value = norm.item()
            if not math.isfinite(value):
                raise RuntimeError(_text(norm_type, value) + ", so they cannot be clipped. " + _WAY_OUT)
            return
        from fabric.core.source import user_line

        copy = torch.empty((), dtype=norm.dtype, pin_memory=True).copy_(norm.detach(), non_blocking=True)
        event = torch.Event(norm.device)
        event.record(torch.accelerator.current_stream(norm.device))
        self._late = copy, event, norm_type, user_line()

    def look(self) -> None:
        """Look at the last norm of a device, if nobody has.

        Raises:
            RuntimeError: It is not finite.
        """
        late, self._late = self._late, None
        if late is None:
            return
        copy, event, norm_type, line = late
        if not event.query():
            event.synchronize()
        value = copy.item()
        if not math.isfinite(value):
            raise RuntimeError(
                f"{_text(norm_type, value)}. They were clipped in the call before this one ({line}): the "
                "host does not wait for the device to look at the norm. Optimizers that have stepped since "
                f"have made parameters NaN with them: go on from a checkpoint of before. {_WAY_OUT}"
            )


_WAY_OUT = "Pass error_if_nonfinite=False to scale them by it anyway."


def _text(norm_type: float, value: float) -> str:
    return f"The total norm of order {norm_type} of the gradients of the whole model is {value} (non-finite)"


def norm_over_ranks(spread: list[tuple[list[Tensor], list[Any]]], norm_type: float, staging: Any) -> Tensor:
    """The norm of tensors of which ranks have different ones, or parts. All ranks of the groups.

    Args:
        spread: This rank's tensors, and the groups whose ranks have the others; the same groups on all ranks.
        norm_type: Its order.
        staging: The device that messages travel from.
    """
    from fabric.collectives.ordered import from_ordered, to_ordered

    infinite = math.isinf(norm_type)
    wide = torch.float32 if torch.device(staging).type == "mps" else torch.float64
    powers = []
    for tensors, groups in spread:
        held = [tensor.detach() for tensor in tensors if tensor.numel()]
        exact = torch.float64 if any([tensor.dtype == torch.float64 for tensor in held]) else torch.float32
        each = (
            torch.stack(foreach_norm(held, norm_type, dtype=exact))
            if held
            else torch.zeros(1, device=staging)
        )
        each = each.to(staging, wide)
        power = each.max() if infinite else each.pow(norm_type).sum()
        if infinite:  # backends lose NaN in a maximum
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
    """Tensors by what one kernel can work on."""
    groups: dict[tuple[torch.dtype, torch.device, torch.layout], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device, tensor.layout), []).append(tensor)
    return groups
