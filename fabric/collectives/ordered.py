"""Map floats to integers of the same order, for minimum and maximum: backends lose NaN in them.

NCCL returns the number. In gloo the result depends on the order of operands: on 2 ranks `max(0, NaN)` is
NaN or 0, depending on which rank has the NaN (measured). torch, and a reduction inside a frame, return NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_AS_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def to_ordered(values: Tensor, largest: bool) -> Tensor:
    """Return integers in the order of the floats; NaN is the largest of all (or the smallest).

    float16 and bfloat16 are converted to float32, which holds them exactly.
    """
    wide = values if values.dtype in _AS_INTEGERS else values.float()
    keys = _flip(wide.contiguous().view(_AS_INTEGERS[wide.dtype]))
    limits = torch.iinfo(keys.dtype)
    return keys.masked_fill_(wide.isnan(), limits.max if largest else limits.min)


def from_ordered(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the floats for a result of `to_ordered`; the bits of a NaN may differ."""
    wide = next(wide for wide, integers in _AS_INTEGERS.items() if integers is keys.dtype)
    return _flip(keys).view(wide).to(dtype)


def _flip(bits: Tensor) -> Tensor:
    # Floats are sign and magnitude, integers two's complement: negative values are in reverse order.
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
