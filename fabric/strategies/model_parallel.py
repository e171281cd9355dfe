"""A path of Lightning Fabric; the code is in `fabric/strategies/tensor_parallel/strategy.py`."""

from fabric.core.lazy import lazy_names
from fabric.strategies.tensor_parallel.strategy import ModelParallelStrategy as ModelParallelStrategy

__getattr__ = lazy_names(__name__)
