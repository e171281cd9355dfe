"""All parameters on every rank, optimizer states on one rank each."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.strategies.zero1.strategy import ZeRO1Strategy as ZeRO1Strategy

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ZeRO1Strategy": "fabric.strategies.zero1.strategy",
    },
)
