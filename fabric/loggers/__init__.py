"""Loggers for CSV, TensorBoard, W&B and MLflow, and their base class; modules are imported on first use."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.loggers.csv_logger import CSVLogger as CSVLogger
    from fabric.loggers.logger import Logger as Logger
    from fabric.loggers.mlflow_logger import MLFlowLogger as MLFlowLogger
    from fabric.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from fabric.loggers.wandb_logger import WandbLogger as WandbLogger

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "CSVLogger": "fabric.loggers.csv_logger",
        "Logger": "fabric.loggers.logger",
        "MLFlowLogger": "fabric.loggers.mlflow_logger",
        "TensorBoardLogger": "fabric.loggers.tensorboard",
        "WandbLogger": "fabric.loggers.wandb_logger",
    },
)
