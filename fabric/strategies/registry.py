"""Strategy names: every string that `Fabric(strategy=...)` accepts."""

from __future__ import annotations

from typing import Any

from fabric.core.registry import Registry

STRATEGY_REGISTRY = Registry("strategy", "fabric.strategies")
"""Factories of strategies by name; third parties register theirs here or by an entry point."""

_StrategyRegistry = Registry  # Lightning Fabric's name for it

_FSDP = "fsdp.strategy:FSDPStrategy"
_XLA = "fabric.integrations.tpu.xla:refuse"
_GRADIENTS: dict[str, Any] = {"sharding_strategy": "SHARD_GRAD_OP"}
_NAMES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("single_device", "single_device:SingleDeviceStrategy", "one process, one device", {"device": None}),
    (
        "dp",
        "data_parallel.strategy:DataParallelStrategy",
        "one process, the batch split over its devices",
        {},
    ),
    (
        "ddp2",
        "data_parallel.strategy:DDP2Strategy",
        "one process per machine: dp in it, ddp across machines",
        {},
    ),
    ("fsdp", _FSDP, "parameters, gradients and optimizer states sharded (FSDP2)", {}),
    ("zero3", _FSDP, "the same as fsdp", {}),
    ("fsdp_cpu_offload", _FSDP, "fsdp with parameters in host memory", {"cpu_offload": True}),
    ("zero2", _FSDP, "gradients and optimizer states sharded", _GRADIENTS),
    ("ddp_sharded", _FSDP, "the same as zero2", _GRADIENTS),
    ("hsdp", _FSDP, "fsdp within each node", {"sharding_strategy": "HYBRID_SHARD"}),
    ("zero1", "zero1.strategy:ZeRO1Strategy", "DDP with optimizer states sharded", {}),
    ("local_sgd", "local_sgd.strategy:LocalSGDStrategy", "ranks average their parameters every 16 steps", {}),
    ("pipeline", "pipeline.strategy:PipelineStrategy", "a model in stages, run on micro-batches", {}),
    ("horovod", "fabric.integrations.horovod.strategy:HorovodStrategy", "DDP by Horovod", {}),
    ("xla", _XLA, "torch_xla's: an error", {"asked": "xla", "instead": "ddp"}),
    ("xla_fsdp", _XLA, "torch_xla's: an error", {"asked": "xla_fsdp", "instead": "fsdp"}),
    ("single_xla", _XLA, "torch_xla's: an error", {"asked": "single_xla", "instead": "single_device"}),
]
_DDP = "ddp.strategy:DDPStrategy"
for _suffix, _method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
    _how: dict[str, Any] = {"start_method": _method}
    _unused = {**_how, "find_unused_parameters": True}
    _NAMES += [
        (f"ddp{_suffix}", _DDP, f"DDP, started by {_method}", _how),
        (f"ddp_find_unused_parameters_true{_suffix}", _DDP, "DDP that finds unused parameters", _unused),
    ]

_STATES: dict[str, Any] = {"offload_optimizer": True}
_ALL = {**_STATES, "offload_parameters": True}
_NVME = {**_ALL, "offload_optimizer_device": "nvme", "offload_params_device": "nvme", "remote_device": "nvme"}
for _suffix, _settings in {
    "": {},
    "_stage_1": {"stage": 1},
    "_stage_1_offload": {"stage": 1, **_STATES},
    "_stage_2": {"stage": 2},
    "_stage_2_offload": {"stage": 2, **_STATES},
    "_stage_3": {"stage": 3},
    "_stage_3_offload": {"stage": 3, **_ALL},
    "_stage_3_offload_nvme": {"stage": 3, **_NVME},
}.items():
    _engine = "fabric.integrations.deepspeed.strategy:DeepSpeedStrategy"
    _NAMES.append((f"deepspeed{_suffix}", _engine, "ZeRO by DeepSpeed's engine", _settings))

for _name, _factory, _what, _settings in _NAMES:
    _factory = _factory if _factory.startswith("fabric.") else f"fabric.strategies.{_factory}"
    STRATEGY_REGISTRY.register(_name, _factory, _what, **_settings)
