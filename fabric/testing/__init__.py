"""Test tools for authors of strategies and loops: `RankPool`, `check_strategy`. Names load lazily."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.testing.communication import communication
    from fabric.testing.contract import check_strategy
    from fabric.testing.failures import RankFailure, RankTimeout
    from fabric.testing.pool import RankPool
    from fabric.testing.worker import rank_info

__all__ = ["RankFailure", "RankPool", "RankTimeout", "check_strategy", "communication", "rank_info"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "RankFailure": "fabric.testing.failures",
        "RankPool": "fabric.testing.pool",
        "RankTimeout": "fabric.testing.failures",
        "check_strategy": "fabric.testing.contract",
        "communication": "fabric.testing.communication",
        "rank_info": "fabric.testing.worker",
    },
)
