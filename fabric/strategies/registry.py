"""Strategy names: every string that `Fabric(strategy=...)` takes."""

from __future__ import annotations

from typing import Any

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
STRATEGY_REGISTRY.register(
    "dp", "fabric.strategies.dp:DataParallelStrategy", "one process, the batch split over its devices"
)
STRATEGY_REGISTRY.register(
    "ddp2",
    "fabric.strategies.ddp2:DDP2Strategy",
    "one process per machine, its batch split over its devices; DDP across machines",
)

_FSDP = "fabric.strategies.fsdp:FSDPStrategy"
for _name, _what, _settings in (
    ("fsdp", "parameters, gradients and optimizer states split over ranks (FSDP2)", {}),
    ("zero3", "the same as fsdp", {}),
    ("fsdp_cpu_offload", "fsdp in host memory", {"cpu_offload": True}),
    ("zero2", "gradients and optimizer states split over ranks", {"sharding_strategy": "SHARD_GRAD_OP"}),
    ("ddp_sharded", "the same as zero2", {"sharding_strategy": "SHARD_GRAD_OP"}),
    ("hsdp", "fsdp within each node, replicated across nodes", {"sharding_strategy": "HYBRID_SHARD"}),
):
    STRATEGY_REGISTRY.register(_name, _FSDP, _what, **_settings)

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

STRATEGY_REGISTRY.register(
    "zero1", "fabric.strategies.zero1:ZeRO1Strategy", "DDP with the optimizer states divided over ranks"
)
STRATEGY_REGISTRY.register(
    "local_sgd",
    "fabric.strategies.local_sgd:LocalSGDStrategy",
    "ranks step by themselves, and go on from their mean after every 16 steps",
)
STRATEGY_REGISTRY.register(
    "pipeline", "fabric.strategies.pipeline:PipelineStrategy", "a model in stages, fed with micro-batches"
)
STRATEGY_REGISTRY.register(
    "horovod", "fabric.integrations.horovod.strategy:HorovodStrategy", "DDP whose gradients travel by Horovod"
)
_DEEPSPEED = "fabric.integrations.deepspeed.strategy:DeepSpeedStrategy"
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
    STRATEGY_REGISTRY.register(f"deepspeed{_suffix}", _DEEPSPEED, "ZeRO by DeepSpeed's engine", **_settings)

for _name, _instead in {"xla": "ddp", "xla_fsdp": "fsdp", "single_xla": "single_device"}.items():
    STRATEGY_REGISTRY.register(
        _name,
        "fabric.integrations.tpu.xla:refuse",
        f"torch_xla's: an error that says what to write ({_instead})",
        asked=_name,
        instead=_instead,
    )
