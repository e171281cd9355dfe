"""Dtypes and loss scaling around forward, backward and step."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.precision.mixed import FSDPPrecision as FSDPPrecision
    from fabric.precision.mixed import MixedPrecision as MixedPrecision
    from fabric.precision.precision import PRECISION_REGISTRY as PRECISION_REGISTRY
    from fabric.precision.precision import Precision as Precision
    from fabric.precision.true import DoublePrecision as DoublePrecision
    from fabric.precision.true import HalfPrecision as HalfPrecision

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "PRECISION_REGISTRY": "fabric.precision.precision",
        "BitsandbytesPrecision": "fabric.integrations.bitsandbytes.precision",
        "DeepSpeedPrecision": "fabric.integrations.deepspeed.precision",
        "DoublePrecision": "fabric.precision.true",
        "FSDPPrecision": "fabric.precision.mixed",
        "HalfPrecision": "fabric.precision.true",
        "MixedPrecision": "fabric.precision.mixed",
        "Precision": "fabric.precision.precision",
        "TorchAOPrecision": "fabric.integrations.torchao.precision",
        "TransformerEnginePrecision": "fabric.integrations.transformer_engine.precision",
    },
)
