"""Strategies: compositions of a layout and other parts."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.strategies.context_parallel.part import ContextParallel as ContextParallel
    from fabric.strategies.data_parallel.strategy import DataParallelStrategy as DataParallelStrategy
    from fabric.strategies.data_parallel.strategy import DDP2Strategy as DDP2Strategy
    from fabric.strategies.ddp.strategy import DDPStrategy as DDPStrategy
    from fabric.strategies.fsdp.strategy import FSDPStrategy as FSDPStrategy
    from fabric.strategies.local_sgd.strategy import LocalSGDStrategy as LocalSGDStrategy
    from fabric.strategies.parallel import ParallelStrategy as ParallelStrategy
    from fabric.strategies.pipeline.strategy import PipelineStrategy as PipelineStrategy
    from fabric.strategies.registry import STRATEGY_REGISTRY as STRATEGY_REGISTRY
    from fabric.strategies.single_device import SingleDeviceStrategy as SingleDeviceStrategy
    from fabric.strategies.strategy import Strategy as Strategy
    from fabric.strategies.tensor_parallel.strategy import ModelParallelStrategy as ModelParallelStrategy
    from fabric.strategies.zero1.strategy import ZeRO1Strategy as ZeRO1Strategy

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "STRATEGY_REGISTRY": "fabric.strategies.registry",
        "ContextParallel": "fabric.strategies.context_parallel.part",
        "DDP2Strategy": "fabric.strategies.data_parallel.strategy",
        "DDPStrategy": "fabric.strategies.ddp.strategy",
        "DataParallelStrategy": "fabric.strategies.data_parallel.strategy",
        "DeepSpeedStrategy": "fabric.integrations.deepspeed.strategy",
        "FSDPStrategy": "fabric.strategies.fsdp.strategy",
        "LocalSGDStrategy": "fabric.strategies.local_sgd.strategy",
        "ModelParallelStrategy": "fabric.strategies.tensor_parallel.strategy",
        "ParallelStrategy": "fabric.strategies.parallel",
        "PipelineStrategy": "fabric.strategies.pipeline.strategy",
        "SingleDeviceStrategy": "fabric.strategies.single_device",
        "Strategy": "fabric.strategies.strategy",
        "ZeRO1Strategy": "fabric.strategies.zero1.strategy",
    },
)
