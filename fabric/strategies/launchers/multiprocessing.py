"""Lightning Fabric has `_MultiProcessingLauncher` under this path."""

from fabric.launch.functions.multiprocess import MultiprocessLauncher

_MultiProcessingLauncher = MultiprocessLauncher
