"""Composition of forward plans: the only place that knows which plan a precision plugin gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.forward import AutocastForward, CastForward, PluginForward
from fabric.plugins.precision.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Callable


def precision_plan(precision: Precision, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with the precision around it; `call` itself where the precision adds nothing."""
    conversions = ("forward_context", "convert_input", "convert_output")
    kind = type(precision)
    if not overridden(kind, Precision, *conversions):
        return call
    from fabric.plugins.precision.mixed import MixedPrecision
    from fabric.plugins.precision.true import TruePrecision

    if isinstance(precision, MixedPrecision) and not overridden(kind, MixedPrecision, *conversions):
        return AutocastForward(call, precision.device, precision.dtype, precision.output_dtype)
    if isinstance(precision, TruePrecision) and not overridden(kind, TruePrecision, *conversions):
        return CastForward(call, precision.dtype, precision.output_dtype)
    return PluginForward(call, precision)


def overridden(kind: type, base: type, *names: str) -> bool:
    """Whether class `kind` replaces any of the methods `names` of `base`."""
    return any([getattr(kind, name) is not getattr(base, name) for name in names])
