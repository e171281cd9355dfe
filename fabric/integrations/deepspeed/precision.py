"""`DeepSpeedPrecision`: casts inputs and outputs. The engine has parameter dtypes, masters and loss scale."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ConfigurationError
from fabric.core.precision import POLICIES, parse_precision
from fabric.precision.dtypes import CastTo
from fabric.precision.precision import Precision

if TYPE_CHECKING:
    from fabric.core.precision import DtypePolicy

PRECISIONS = ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
WHY = "DeepSpeed's engine has no float64"


class DeepSpeedPrecision(Precision):
    """Precision of `Fabric(strategy="deepspeed", precision=...)`.

    DeepSpeed has one kind of half precision, for both "-true" and "-mixed": parameters and gradients in half
    precision, and master weights in float32 that the optimizer steps. Inputs are cast, and outputs have
    torch's default dtype.

    Args:
        precision: One of "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed", or an alias.

    Raises:
        ConfigurationError: Another name.
    """

    def __init__(self, precision: Any) -> None:
        self.precision = parse_precision(precision).name
        if self.precision not in PRECISIONS:
            raise ConfigurationError(
                f"DeepSpeedPrecision({precision!r}): {WHY}. Write one of {', '.join(map(repr, PRECISIONS))}."
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and of computation."""
        half = torch.bfloat16 if self.precision.startswith("bf16") else torch.float16
        return torch.float32 if self.precision == "32-true" else half

    @property
    def policy(self) -> DtypePolicy:
        """The dtype policy of the name."""
        return replace(POLICIES[self.precision], loss_scale=self.dtype == torch.float16)

    def convert_input(self, data: Any) -> Any:
        """Return the tree `data` with floating-point tensors in the dtype of the parameters."""
        return data if self.dtype == torch.float32 else CastTo(self.dtype)(data)

    def convert_output(self, data: Any) -> Any:
        """Return the tree `data` with floating-point tensors in torch's default dtype."""
        return data if self.dtype == torch.float32 else CastTo(torch.get_default_dtype())(data)
