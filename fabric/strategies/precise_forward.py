"""Forward plans of precisions: the callables between `model(x)` and the user's `forward`, made at setup.

A plan is an object with `__call__`, not a closure, so that deepcopy, pickle and torch.compile work. Each
plan adds one stack frame. This module is imported only for a precision that converts or autocasts.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.traits import overridden
from fabric.precision.dtypes import CastTo
from fabric.precision.mixed import MixedPrecision
from fabric.precision.precision import CONVERSIONS, Precision
from fabric.precision.true import TruePrecision

if TYPE_CHECKING:
    from collections.abc import Callable

_Tensor, _FLOAT = torch.Tensor, torch.float32


def precision_plan(precision: Precision, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with the precision's conversions or autocast around it."""
    kind = type(precision)
    if isinstance(precision, MixedPrecision) and not overridden(kind, MixedPrecision, *CONVERSIONS):
        return AutocastForward(call, precision.device, precision.dtype, precision.output_dtype)
    if isinstance(precision, TruePrecision) and not overridden(kind, TruePrecision, *CONVERSIONS):
        return CastForward(call, precision.dtype, precision.output_dtype)
    return PluginForward(call, precision)


class AutocastForward:
    """The plan of "16-mixed" and "bf16-mixed": autocast around the call, float outputs cast to `output`."""

    __slots__ = ("_cast_input", "_cast_output", "call", "device_type", "dtype", "output")

    def __init__(
        self, call: Callable[..., Any], device_type: str, dtype: torch.dtype, output: torch.dtype | None
    ) -> None:
        self.call = call
        self.device_type = device_type
        self.dtype = dtype
        self.output = output
        self._cast_input = CastTo(torch.float32)
        self._cast_output = CastTo(output)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call; with `output` None outputs keep their dtype."""
        # One plain float32 tensor is the common case, and costs no frame.
        if kwargs or len(args) != 1 or type(args[0]) is not _Tensor or args[0].dtype is not torch.float32:
            args, kwargs = self._cast_input.arguments(args, kwargs)
        if torch.compiler.is_compiling():
            with torch.autocast(self.device_type, self.dtype):
                out = self.call(*args, **kwargs)
        else:
            # The same as `with torch.autocast` at a third of its cost: its argument checks were made at
            # setup.
            kind = self.device_type
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, self.dtype)
            torch.set_autocast_cache_enabled(True)
            torch.autocast_increment_nesting()
            try:
                out = self.call(*args, **kwargs)
            finally:
                if torch.autocast_decrement_nesting() == 0:
                    torch.clear_autocast_cache()
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
                torch.set_autocast_cache_enabled(cached)
        if self.output is None:
            return out
        if type(out) is _Tensor and out.is_floating_point():
            return out.float() if self.output is _FLOAT else out.to(self.output)
        return self._cast_output(out)


class CastForward:
    """The plan of "64-true", "16-true", "bf16-true": inputs cast to `dtype`, torch's default dtype inside."""

    __slots__ = ("_cast_input", "_cast_output", "call", "dtype")

    def __init__(self, call: Callable[..., Any], dtype: torch.dtype, output: torch.dtype | None) -> None:
        self.call = call
        self.dtype = dtype
        self._cast_input = CastTo(dtype)
        self._cast_output = CastTo(output)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call with `dtype` as torch's default dtype; restore it also after an error."""
        args, kwargs = self._cast_input.arguments(args, kwargs)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            out = self.call(*args, **kwargs)
        finally:
            torch.set_default_dtype(previous)
        return self._cast_output(out)


class PluginForward:
    """The plan for a precision plugin with its own `convert_input`, `convert_output` or `forward_context`."""

    __slots__ = ("call", "precision")

    def __init__(self, call: Callable[..., Any], precision: Any) -> None:
        self.call = call
        self.precision = precision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call between the plugin's conversions."""
        precision = self.precision
        args, kwargs = precision.convert_input((args, kwargs))
        with precision.forward_context():
            out = self.call(*args, **kwargs)
        return precision.convert_output(out)

    def __deepcopy__(self, memo: dict[int, Any]) -> PluginForward:
        # A copied model shares the plugin, whose state (a loss scale) belongs to the job, not to a model.
        return PluginForward(deepcopy(self.call, memo), self.precision)
