"""From a precision's name to its plugin. What names there are, and their dtypes: `core/precision.py`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.precision import find_policy
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


def make_precision(value: object, device_type: str) -> Precision:
    """The plugin for what a user wrote as `precision=`.

    Raises:
        ConfigurationError: The value names no precision.
    """
    policy = find_policy(value)
    name: Any = value if policy is None else policy.name
    takes_device = "device" in inspect.signature(PRECISION_REGISTRY.entry(name).load()).parameters
    plugin: Precision = PRECISION_REGISTRY.get(name, **({"device": device_type} if takes_device else {}))
    return plugin
