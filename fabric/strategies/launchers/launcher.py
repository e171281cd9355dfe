"""Lightning Fabric has `_Launcher` under this path."""

from fabric.launch.launcher import Launcher

_Launcher = Launcher
