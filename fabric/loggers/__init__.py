"""Loggers: csv and tensorboard, and the base for users' own; names load on first use."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.loggers.csv_logger import CSVLogger
    from fabric.loggers.logger import Logger
    from fabric.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "CSVLogger": "fabric.loggers.csv_logger",
        "Logger": "fabric.loggers.logger",
        "TensorBoardLogger": "fabric.loggers.tensorboard",
    },
)
