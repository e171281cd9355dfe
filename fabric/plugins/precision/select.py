"""From a precision's name to its plugin."""

from __future__ import annotations

from fabric.core.errors import ConfigurationError
from fabric.core.policy import parse_precision
from fabric.core.registry import Registry
from fabric.plugins.precision.double import DoublePrecision
from fabric.plugins.precision.half import HalfPrecision
from fabric.plugins.precision.mixed import MixedPrecision
from fabric.plugins.precision.precision import Precision

PRECISION_REGISTRY = Registry("precision", "fabric.precisions")
"""Factories of precision plugins by name; each is called with the accelerator's device type as `device=`."""

PRECISION_REGISTRY.register("64-true", lambda device: DoublePrecision(), "all float64")
PRECISION_REGISTRY.register("32-true", lambda device: Precision(), "as the model is")
for _name in ("16-true", "bf16-true"):
    PRECISION_REGISTRY.register(
        _name, lambda device, precision: HalfPrecision(precision), "all half", precision=_name
    )
for _name in ("16-mixed", "bf16-mixed"):
    PRECISION_REGISTRY.register(
        _name, lambda device, precision: MixedPrecision(precision, device), "autocast", precision=_name
    )


def make_precision(value: object, device_type: str) -> Precision:
    """The plugin for what a user wrote as `precision=`.

    Raises:
        ConfigurationError: The value names no precision.
    """
    try:
        name = parse_precision(value).name
    except ConfigurationError:
        if value not in PRECISION_REGISTRY:  # looks at third parties' entry points, so it comes last
            raise
        name = value  # type: ignore[assignment]
    plugin: Precision = PRECISION_REGISTRY.get(name, device=device_type)
    return plugin
