"""`FlopCounter`: the floating-point operations of one step of a run, for its FLOP/s and MFU."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.utils.flop_counter import flop_registry

from fabric.report._torch import TorchDispatchMode
from fabric.throughput.flops import get_available_flops

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class FlopCounter(TorchDispatchMode):
    """Counts matrix products, convolutions and attention, of this rank; a multiply-add counts as two.

    Attributes:
        flops: The operations so far; NaN: torch cannot count one of them.

    Source: `torch.utils.flop_counter`, whose own mode also hooks all modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `call(*args, **kwargs)`, and count its operations."""
        with self:
            return call(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        kwargs = kwargs or {}
        kinds = {kind.__name__ for kind in types}
        if "DTensor" in kinds:
            return NotImplemented  # it runs operations of this rank's parts, which are counted
        result = func(*args, **kwargs)
        formula = None if "FakeTensor" in kinds else flop_registry.get(func.overloadpacket)
        if formula is not None:
            try:
                self.flops += formula(*args, **kwargs, out_val=result)
            except Exception:  # torch's formula does not support the shapes: the rate would be too low
                self.flops = float("nan")
        return result


def peak_flops(device: torch.device, dtype: torch.dtype) -> int | None:
    """Return the published peak of the device in FLOP/s, or None if it is unknown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_available_flops(device, dtype)
