"""`HalfPrecision`: the plugin behind precision="16-true" and "bf16-true"."""

from __future__ import annotations

from typing import Literal

import torch

from fabric.core.errors import ConfigurationError
from fabric.plugins.precision.true import TruePrecision

_DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class HalfPrecision(TruePrecision):
    """Everything in float16 or bfloat16, no loss scaling; see `TruePrecision` for `output_dtype`.

    Raises:
        ConfigurationError: `precision` is neither "16-true" nor "bf16-true".
    """

    def __init__(
        self,
        precision: Literal["bf16-true", "16-true"] = "16-true",
        *,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        if precision not in _DTYPES:
            raise ConfigurationError(
                f"HalfPrecision(precision={precision!r}) is not one of {', '.join(map(repr, _DTYPES))}. "
                f"Write Fabric(precision={precision!r}) to get the plugin that fits."
            )
        super().__init__(_DTYPES[precision], output_dtype)
        self.precision = precision
