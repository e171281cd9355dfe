"""Lightning Fabric has `CSVLogger` under this path."""

from fabric.loggers.csv_logger import CSVLogger as CSVLogger
