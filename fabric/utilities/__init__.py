"""Helpers, one module per topic. The names of this package load on first use."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.strategies.context_parallel.sequence import sequence_positions as sequence_positions
    from fabric.throughput.throughput import Throughput as Throughput
    from fabric.throughput.throughput import ThroughputMonitor as ThroughputMonitor
    from fabric.throughput.throughput import measure_flops as measure_flops
    from fabric.utilities.apply_func import move_data_to_device as move_data_to_device
    from fabric.utilities.data import AttributeDict as AttributeDict
    from fabric.utilities.data import suggested_max_num_workers as suggested_max_num_workers
    from fabric.utilities.distributed import is_shared_filesystem as is_shared_filesystem
    from fabric.utilities.enums import LightningEnum as LightningEnum
    from fabric.utilities.rank_zero import rank_zero_deprecation as rank_zero_deprecation
    from fabric.utilities.rank_zero import rank_zero_info as rank_zero_info
    from fabric.utilities.rank_zero import rank_zero_only as rank_zero_only
    from fabric.utilities.rank_zero import rank_zero_warn as rank_zero_warn
    from fabric.utilities.warnings import disable_possible_user_warnings as disable_possible_user_warnings

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "AttributeDict": "fabric.utilities.data",
        "LightningEnum": "fabric.utilities.enums",
        "Throughput": "fabric.throughput.throughput",
        "ThroughputMonitor": "fabric.throughput.throughput",
        "disable_possible_user_warnings": "fabric.utilities.warnings",
        "is_shared_filesystem": "fabric.utilities.distributed",
        "measure_flops": "fabric.throughput.throughput",
        "move_data_to_device": "fabric.utilities.apply_func",
        "rank_zero_deprecation": "fabric.utilities.rank_zero",
        "rank_zero_info": "fabric.utilities.rank_zero",
        "rank_zero_only": "fabric.utilities.rank_zero",
        "rank_zero_warn": "fabric.utilities.rank_zero",
        "sequence_positions": "fabric.strategies.context_parallel.sequence",
        "suggested_max_num_workers": "fabric.utilities.data",
    },
)
