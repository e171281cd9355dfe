"""Fully sharded data parallel: parameters, gradients and optimizer states split over ranks."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.strategies.fsdp.strategy import FSDPStrategy as FSDPStrategy

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "FSDPStrategy": "fabric.strategies.fsdp.strategy",
    },
)
