"""Strategies: short recipes that choose parts."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.strategies.ddp import DDPStrategy
    from fabric.strategies.parallel import ParallelStrategy
    from fabric.strategies.registry import STRATEGY_REGISTRY
    from fabric.strategies.single_device import SingleDeviceStrategy
    from fabric.strategies.strategy import Strategy

__all__ = ["STRATEGY_REGISTRY", "DDPStrategy", "ParallelStrategy", "SingleDeviceStrategy", "Strategy"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "STRATEGY_REGISTRY": "fabric.strategies.registry",
        "DDPStrategy": "fabric.strategies.ddp",
        "ParallelStrategy": "fabric.strategies.parallel",
        "SingleDeviceStrategy": "fabric.strategies.single_device",
        "Strategy": "fabric.strategies.strategy",
    },
)
