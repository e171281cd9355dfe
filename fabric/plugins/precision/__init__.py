"""Dtypes and loss scaling around forward, backward and step."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.plugins.precision.mixed import FSDPPrecision as FSDPPrecision
    from fabric.plugins.precision.mixed import MixedPrecision as MixedPrecision
    from fabric.plugins.precision.precision import PRECISION_REGISTRY as PRECISION_REGISTRY
    from fabric.plugins.precision.precision import Precision as Precision
    from fabric.plugins.precision.true import DoublePrecision as DoublePrecision
    from fabric.plugins.precision.true import HalfPrecision as HalfPrecision

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "PRECISION_REGISTRY": "fabric.plugins.precision.precision",
        "BitsandbytesPrecision": "fabric.integrations.bitsandbytes.precision",
        "DeepSpeedPrecision": "fabric.integrations.deepspeed.precision",
        "DoublePrecision": "fabric.plugins.precision.true",
        "FSDPPrecision": "fabric.plugins.precision.mixed",
        "HalfPrecision": "fabric.plugins.precision.true",
        "MixedPrecision": "fabric.plugins.precision.mixed",
        "Precision": "fabric.plugins.precision.precision",
        "TorchAOPrecision": "fabric.integrations.torchao.precision",
        "TransformerEnginePrecision": "fabric.integrations.transformer_engine.precision",
    },
)
