"""The plugins behind "64-true", "16-true" and "bf16-true": the module itself is cast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from fabric.precision.dtypes import CastTo
from fabric.precision.precision import DefaultDtype, Precision, policy_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.nn import Module


class TruePrecision(Precision):
    """Parameters, buffers and float inputs are cast to one dtype; outputs come back in the default dtype.

    Args:
        dtype: The dtype of parameters and compute.
        output_dtype: Dtype of floating-point outputs; None gives `torch.get_default_dtype()` at call time, as
            Lightning Fabric does.
    """

    def __init__(self, dtype: torch.dtype, output_dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.output_dtype = output_dtype

    def convert_module(self, module: Module) -> Module:
        """The module with floating-point and complex parameters and buffers cast in place."""
        cast: Module = module._apply(CastTo(self.dtype))
        return cast

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """New floating-point tensors get the dtype."""
        return DefaultDtype(self.dtype)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """New modules get the dtype."""
        return DefaultDtype(self.dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        """The dtype is torch's default inside."""
        return DefaultDtype(self.dtype)

    def convert_input(self, data: Any) -> Any:
        """Floating-point tensors in the dtype, complex ones in that of its precision."""
        return CastTo(self.dtype)(data)

    def convert_output(self, data: Any) -> Any:
        """Floating-point tensors in `output_dtype`."""
        return CastTo(self.output_dtype)(data)


class DoublePrecision(TruePrecision):
    """Everything in float64; see `TruePrecision` for `output_dtype`."""

    precision = "64-true"

    def __init__(self, *, output_dtype: torch.dtype | None = None) -> None:
        super().__init__(torch.float64, output_dtype)


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
        super().__init__(policy_of(self, precision, "16-true", "bf16-true").compute, output_dtype)
        self.precision = precision
