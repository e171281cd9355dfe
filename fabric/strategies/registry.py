"""Strategy names: every string that `Fabric(strategy=...)` takes."""

from __future__ import annotations

from fabric.core.registry import Registry

STRATEGY_REGISTRY = Registry("strategy", "fabric.strategies")
"""Factories of strategies by name; third parties add theirs here or by an entry point."""

_DDP = "fabric.strategies.ddp:DDPStrategy"

STRATEGY_REGISTRY.register(
    "single_device",
    "fabric.strategies.single_device:SingleDeviceStrategy",
    "one process, one device",
    device=None,
)

for _suffix, _method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
    STRATEGY_REGISTRY.register(
        f"ddp{_suffix}", _DDP, f"DDP, processes started by {_method}", start_method=_method
    )
    STRATEGY_REGISTRY.register(
        f"ddp_find_unused_parameters_true{_suffix}",
        _DDP,
        f"DDP that looks for unused parameters, processes started by {_method}",
        start_method=_method,
        find_unused_parameters=True,
    )
