"""From a precision's name to its plugin. What names there are, and their dtypes: `core/precision.py`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

from fabric.core.errors import ConfigurationError
from fabric.core.precision import POLICIES, parse_precision
from fabric.core.registry import Registry

if TYPE_CHECKING:
    from fabric.plugins.precision.precision import Precision

PRECISION_REGISTRY = Registry("precision", "fabric.precisions")
"""Precision plugins by name; a factory with a parameter `device` gets the accelerator's device type."""

_HOME = "fabric.plugins.precision."
PRECISION_REGISTRY.register("64-true", f"{_HOME}true:DoublePrecision", "all float64")
PRECISION_REGISTRY.register("32-true", f"{_HOME}precision:Precision", "as the model is")
for _name in ("16-true", "bf16-true"):
    PRECISION_REGISTRY.register(_name, f"{_HOME}true:HalfPrecision", "all half", precision=_name)
for _name in ("16-mixed", "bf16-mixed"):
    PRECISION_REGISTRY.register(_name, f"{_HOME}mixed:MixedPrecision", "autocast", precision=_name)
PRECISION_REGISTRY.register(
    "float8", "fabric.integrations.torchao.precision:TorchAOPrecision", "linear layers multiply in float8"
)
_ENGINE = "fabric.integrations.transformer_engine.precision:TransformerEnginePrecision"
for _name, _dtype in (("transformer-engine", torch.bfloat16), ("transformer-engine-float16", torch.float16)):
    PRECISION_REGISTRY.register(_name, _ENGINE, "NVIDIA's Transformer Engine", weights_dtype=_dtype)


_MODES = {
    "BitsandbytesPrecision": ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"),
    "TorchAOPrecision": ("int8-weights",),
}
"""What is no precision, but a mode of a plugin."""


def make_precision(value: object, device_type: str) -> Precision:
    """The plugin for what a user wrote as `precision=`.

    Raises:
        ConfigurationError: The value names no precision.
    """
    try:
        name = parse_precision(value).name
    except ConfigurationError as error:
        for kind in [kind for kind, modes in _MODES.items() if value in modes]:
            raise ConfigurationError(
                f"precision={value!r} is a mode of a plugin, which says what else is to be. Write "
                f'Fabric(plugins={kind}("{value}")), with `from fabric.plugins import {kind}`.'
            ) from None
        if value not in PRECISION_REGISTRY:  # looks at third parties' entry points, so it comes last
            others = [repr(name) for name in PRECISION_REGISTRY if name not in POLICIES]
            raise ConfigurationError(f"{error} With packages of others: {', '.join(others)}.") from None
        name = value  # type: ignore[assignment]
    factory = PRECISION_REGISTRY.entry(name).load()
    takes_device = "device" in inspect.signature(factory).parameters
    plugin: Precision = PRECISION_REGISTRY.get(name, **({"device": device_type} if takes_device else {}))
    return plugin
