"""Distributed data parallel: every rank holds all parameters, gradients are averaged."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.strategies.ddp.strategy import DDPStrategy as DDPStrategy

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "DDPStrategy": "fabric.strategies.ddp.strategy",
    },
)
