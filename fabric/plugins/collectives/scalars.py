"""Named numbers reduced over ranks, for logs: all in one message, in float64 on the host.

Called by `Exchange.reduce_scalars`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.plugins.collectives.channel import to_tensors, torch_op
from fabric.plugins.collectives.frames import fold
from fabric.plugins.collectives.gather import gather_tree

if TYPE_CHECKING:
    from torch import Tensor

    from fabric.plugins.collectives.channel import Channel

_EXTREMES = {dist.ReduceOp.MIN: float("inf"), dist.ReduceOp.MAX: -float("inf")}
"""With what stands in for a value that is not there."""


def flat_scalars(values: list[tuple[str, Any]], absent: bool) -> tuple[Tensor, list[bool]]:
    """The values as one tensor, and which of them are there.

    Args:
        values: By name: numbers and one-element tensors.
        absent: Whether None is taken, as not there.

    Raises:
        ConfigurationError: A tensor of several elements.
        ArgumentTypeError: A value that is neither real number nor tensor.
    """
    there = [value is not None or not absent for _, value in values]
    tensors = [_scalar(name, value, here) for (name, value), here in zip(values, there, strict=True)]
    if not tensors:
        return torch.empty(0, dtype=torch.float64), there
    away = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
    wide = torch.float32 if away.type == "mps" else torch.float64
    # One copy from a device, and alike on a rank that holds a number where another holds a tensor.
    flat = torch.stack([t.detach().to(away, wide).reshape(()) for t in tensors])
    return flat.to("cpu", torch.float64), there


def reduce_rows(
    names: list[str], flat: Tensor, there: list[bool], op: Any, size: int, channel: Channel, label: str
) -> Tensor:
    """Every rank's values reduced, those of ranks that see the same data once. All ranks must call this.

    Of such a row counts the value of the last rank that has one: the last stage of a pipeline, where others
    have None. Minimum and maximum are those of all ranks.

    Args:
        names: Of the values.
        flat: This rank's values.
        there: Which of them it has.
        op: As for `reduce_tree`.
        size: Ranks of a row; 1: each rank sees data of its own.
        channel: All ranks.
        label: What the call is to the user.

    Raises:
        ArgumentTypeError: No rank of a row has a value; on all ranks.
        ConfigurationError: Unknown `op`.
    """
    with channel.refusing("log_dict"):
        op = torch_op("sum" if op is None else op)
    sent = torch.stack([flat, torch.tensor(there, dtype=torch.float64)])
    table = gather_tree({", ".join(map(str, names)): sent}, channel, verb=label)
    held = next(iter(table.values())).unflatten(0, (-1, size))  # (rows, ranks of a row, 2, names)
    found, has = held[:, :, 0], held[:, :, 1].bool()
    for name, somewhere in zip(names, has.any(1).all(0).tolist(), strict=True):
        if not somewhere:
            raise ArgumentTypeError(
                f"log_dict: {name!r} is None on all ranks that see the same data, so it has no value. Log it "
                "where one of them has computed it."
            )
    if op in _EXTREMES:
        return fold(found.where(has, found.new_tensor(_EXTREMES[op])).flatten(0, 1), op)
    last = (has * torch.arange(1, size + 1)[:, None]).argmax(1, keepdim=True)
    return fold(found.gather(1, last).squeeze(1), op)


def _scalar(name: str, value: Any, there: bool) -> Tensor:
    if isinstance(value, bool | int | float):
        return torch.tensor(float(value), dtype=torch.float64)  # torch's default dtype would round it
    if not there:
        return torch.zeros((), dtype=torch.float64)
    (tensor,) = to_tensors([value], torch.device("cpu"), "log_dict")
    if tensor.is_complex():
        raise ArgumentTypeError(f"log_dict takes real numbers, but {name!r} is complex. Log its abs().")
    if tensor.numel() != 1:
        raise ConfigurationError(
            f"log_dict(sync_dist=True) takes numbers and one-element tensors, but {name!r} has shape "
            f"{list(tensor.shape)}. Reduce it first: value.mean()"
        )
    return tensor
