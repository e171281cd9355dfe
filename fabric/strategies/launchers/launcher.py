"""A path of Lightning Fabric; the code is in `fabric/launch/launcher.py`."""

from fabric.launch.launcher import _Launcher as _Launcher
