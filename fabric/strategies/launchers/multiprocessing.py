"""Lightning Fabric has `_MultiProcessingLauncher` under this path."""

from fabric.strategies.launchers.multiprocess import MultiprocessLauncher

_MultiProcessingLauncher = MultiprocessLauncher
