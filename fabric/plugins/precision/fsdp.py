"""`FSDPPrecision`: the name under which Lightning Fabric has the precision of sharded strategies."""

from __future__ import annotations

from typing import Any

from fabric.core.precision import parse_precision
from fabric.plugins.precision.precision import Precision
from fabric.plugins.precision.select import make_precision


class FSDPPrecision(Precision):
    """The same as `Fabric(precision=...)`: the plugin of that name takes this one's place.

    Args:
        precision: A name or an alias of it.
        scaler: A GradScaler for "16-mixed"; None makes one.

    Raises:
        ConfigurationError: `precision` names no precision.
    """

    def __init__(self, precision: Any, scaler: Any = None) -> None:
        self.precision = parse_precision(precision).name
        self.scaler = scaler

    def for_device(self, device_type: str) -> Precision:
        """The plugin that does it on devices of this type."""
        if self.scaler is not None:
            from fabric.plugins.precision.mixed import MixedPrecision

            return MixedPrecision(self.precision, device_type, self.scaler)  # type: ignore[arg-type]
        return make_precision(self.precision, device_type)

    @property
    def mixed_precision_config(self) -> Any:
        """torch's MixedPrecisionPolicy: how FSDP2 gathers parameters and reduces gradients."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = self.policy
        half = policy.compute if policy.autocast else None
        return MixedPrecisionPolicy(half, policy.reduce if half else None, cast_forward_inputs=not half)
