"""Tools for authors of strategies and loops: functions on N warm ranks, the contract of a strategy. Lazy."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric.testing.contract import check_strategy
    from fabric.testing.failures import RankFailure, RankTimeout
    from fabric.testing.pool import RankPool
    from fabric.testing.worker import rank_info

__all__ = ["RankFailure", "RankPool", "RankTimeout", "check_strategy", "rank_info"]

_HOMES = {
    "RankFailure": "fabric.testing.failures",
    "RankPool": "fabric.testing.pool",
    "RankTimeout": "fabric.testing.failures",
    "check_strategy": "fabric.testing.contract",
    "rank_info": "fabric.testing.worker",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'fabric.testing' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
