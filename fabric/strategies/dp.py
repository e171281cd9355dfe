"""A path of Lightning Fabric; the code is in `fabric/strategies/data_parallel/strategy.py`."""

from fabric.strategies.data_parallel.strategy import DataParallelStrategy as DataParallelStrategy
from fabric.strategies.data_parallel.strategy import DDP2Strategy as DDP2Strategy
