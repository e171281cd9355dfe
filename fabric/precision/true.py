"""The plugins of "64-true", "16-true" and "bf16-true", which cast the module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from fabric.precision.dtypes import CastTo
from fabric.precision.precision import DefaultDtype, Precision, policy_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.nn import Module


class TruePrecision(Precision):
    """Casts parameters, buffers and float inputs to one dtype, and outputs to the default dtype.

    Args:
        dtype: The dtype of parameters and compute.
        output_dtype: Dtype of floating-point outputs; None: `torch.get_default_dtype()` at call time, as in
            Lightning Fabric.
    """

    def __init__(self, dtype: torch.dtype, output_dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.output_dtype = output_dtype

    def convert_module(self, module: Module) -> Module:
        """Cast floating-point and complex parameters and buffers of `module` in place; return it."""
        cast: Module = module._apply(CastTo(self.dtype))
        return cast

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Context in which new floating-point tensors have the dtype."""
        return DefaultDtype(self.dtype)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Context in which new modules have the dtype."""
        return DefaultDtype(self.dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Context in which the dtype is torch's default."""
        return DefaultDtype(self.dtype)

    def convert_input(self, data: Any) -> Any:
        """Return the tree `data` with floating-point tensors in the dtype, complex ones in the corresponding
        one.
        """
        return CastTo(self.dtype)(data)

    def convert_output(self, data: Any) -> Any:
        """Return the tree `data` with floating-point tensors in `output_dtype`."""
        return CastTo(self.output_dtype)(data)


class DoublePrecision(TruePrecision):
    """Parameters and compute in float64; see `TruePrecision` for `output_dtype`."""

    precision = "64-true"

    def __init__(self, *, output_dtype: torch.dtype | None = None) -> None:
        super().__init__(torch.float64, output_dtype)


class HalfPrecision(TruePrecision):
    """Parameters and compute in float16 or bfloat16, no loss scaling; `output_dtype`: see `TruePrecision`.

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
