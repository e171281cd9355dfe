"""Ranks train independently and average their parameters periodically."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.strategies.local_sgd.strategy import LocalSGDStrategy as LocalSGDStrategy

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LocalSGDStrategy": "fabric.strategies.local_sgd.strategy",
    },
)
