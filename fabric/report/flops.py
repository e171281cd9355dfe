"""`FlopCounter`: the floating-point operations of one step of a run, for its FLOP/s and MFU."""

from __future__ import annotations

import os
import re
import warnings
from typing import TYPE_CHECKING, Any

from torch.utils.flop_counter import flop_registry

from fabric.core.errors import UsageError
from fabric.report._torch import TorchDispatchMode
from fabric.throughput.flops import get_available_flops

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


REPORT_FLOPS = "FABRIC_REPORT_FLOPS"
"""Variable: 1 counts the operations of one step. Off by default: torch runs some code otherwise meanwhile."""
_UNCOUNTED = re.compile("rnn|lstm|gru")
"""Names of operations of matrix products for which torch has no formula."""


class FlopCounter(TorchDispatchMode):
    """Counts matrix products, convolutions and attention, of this rank; a multiply-add counts as two.

    Attributes:
        flops: The operations so far; NaN: torch cannot count one of them.

    Source: `torch.utils.flop_counter`, whose own mode also hooks all modules.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self._runs = False

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `call(*args, **kwargs)`, and count its operations, once also in a nested call.

        Raises:
            UsageError: An operator of higher order runs (`torch.cond`, `flex_attention`).
        """
        if self._runs:
            return call(*args, **kwargs)
        self._runs = True
        try:
            with self:
                return call(*args, **kwargs)
        finally:
            self._runs = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        kwargs = kwargs or {}
        if not hasattr(func, "overloadpacket"):
            raise UsageError(
                f"{REPORT_FLOPS} counts operations in the third step, and torch runs {func} in another way "
                f"while it counts: its gradients may fail. Unset {REPORT_FLOPS}."
            )
        kinds = {kind.__name__ for kind in types}
        if "DTensor" in kinds:
            return NotImplemented  # it runs operations of this rank's parts, which are counted
        result = func(*args, **kwargs)
        formula = None if "FakeTensor" in kinds else flop_registry.get(func.overloadpacket)
        if formula is None and _UNCOUNTED.search(str(func)):
            self.flops = float("nan")
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


def counts_flops() -> bool:
    """Whether FABRIC_REPORT_FLOPS is set."""
    return os.environ.get(REPORT_FLOPS, "").lower() not in ("", "0", "off")
