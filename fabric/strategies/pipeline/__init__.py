"""Pipeline parallelism: a model in stages, one per rank, run on micro-batches."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.strategies.pipeline.strategy import PipelineStrategy as PipelineStrategy

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "PipelineStrategy": "fabric.strategies.pipeline.strategy",
    },
)
