"""`DoublePrecision`: the plugin behind precision="64-true"."""

from __future__ import annotations

import torch

from fabric.plugins.precision.true import TruePrecision


class DoublePrecision(TruePrecision):
    """Everything in float64; see `TruePrecision` for `output_dtype`."""

    precision = "64-true"

    def __init__(self, *, output_dtype: torch.dtype | None = None) -> None:
        super().__init__(torch.float64, output_dtype)
