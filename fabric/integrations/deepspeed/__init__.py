"""DeepSpeed: ZeRO stages 1 to 3 with DeepSpeed's engine, for the same loop."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.integrations.deepspeed.precision import DeepSpeedPrecision as DeepSpeedPrecision
    from fabric.integrations.deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "DeepSpeedPrecision": "fabric.integrations.deepspeed.precision",
        "DeepSpeedStrategy": "fabric.integrations.deepspeed.strategy",
    },
)
