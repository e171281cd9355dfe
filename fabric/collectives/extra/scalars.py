"""Reduce named numbers over ranks, for logs: all in one message, in float64 on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fabric.collectives.channel import to_tensors, torch_op
from fabric.collectives.frames import fold
from fabric.collectives.gather import gather_tree
from fabric.core.errors import ArgumentTypeError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fabric.collectives.channel import Channel

_EXTREMES = {dist.ReduceOp.MIN: float("inf"), dist.ReduceOp.MAX: -float("inf")}
"""Neutral elements, used for missing values."""


def reduce_scalars(values: Mapping[str, Any], op: Any, channel: Channel, size: int) -> dict[str, Tensor]:
    """Return the values reduced over ranks; ranks with the same data count once. All ranks must call this.

    A row is a group of `size` neighbouring ranks that read the same data. Its value is that of the last rank
    that has one (the last stage of a pipeline). Minimum and maximum are over all ranks.

    Args:
        values: Numbers and one-element tensors by name; None is valid in rows of several ranks.
        op: As for `reduce_tree`.
        channel: All ranks.
        size: Number of ranks in a row; 1: each rank reads different data.

    Raises:
        ArgumentTypeError: A value is neither real number nor tensor; or no rank of a row has one.
        ConfigurationError: Unknown `op`; a tensor of several elements.
    """
    label, names = f"log_dict({op})", sorted(values, key=str)  # ranks may have them in different orders
    with channel.validating("log_dict"):
        op = torch_op("sum" if op is None else op)
        numbers = [_number(name, values[name], allow_none=size > 1) for name in names]
    if not names:
        channel.check_barrier(label, "nothing")
        return {}
    present = [value is not None for value in numbers]
    sent = torch.tensor([[value or 0.0 for value in numbers], present], dtype=torch.float64, device="cpu")
    table = gather_tree({", ".join(map(str, names)): sent}, channel, verb=label)
    gathered = next(iter(table.values())).unflatten(0, (-1, size))  # (rows, ranks of a row, 2, names)
    found, has = gathered[:, :, 0], gathered[:, :, 1].bool()
    for name, in_each_row in zip(names, has.any(1).all(0).tolist(), strict=True):
        if not in_each_row:
            raise ArgumentTypeError(
                f"log_dict: {name!r} is None on all ranks that read the same data, so it has no value. Log "
                "it after one of them has computed it."
            )
    if op in _EXTREMES:
        reduced = fold(found.where(has, found.new_tensor(_EXTREMES[op])).flatten(0, 1), op)
    else:
        last = (has * torch.arange(1, size + 1, device="cpu")[:, None]).argmax(1, keepdim=True)
        reduced = fold(found.gather(1, last).squeeze(1), op)
    by_name = dict(zip(names, reduced, strict=True))
    return {name: by_name[name] for name in values}


def _number(name: str, value: Any, allow_none: bool) -> float | None:
    if value is None and allow_none:
        return None
    if isinstance(value, bool | int | float):
        return float(value)  # torch's default dtype would round it
    (tensor,) = to_tensors([value], torch.device("cpu"), "log_dict")
    if tensor.is_complex():
        raise ArgumentTypeError(f"log_dict takes real numbers, but {name!r} is complex. Log its abs().")
    if tensor.numel() != 1:
        raise ConfigurationError(
            f"log_dict(sync_dist=True) takes numbers and one-element tensors, but {name!r} has shape "
            f"{list(tensor.shape)}. Reduce it first: value.mean()"
        )
    return float(tensor.item())
