"""Lightning Fabric has `_SubprocessScriptLauncher` under this path."""

from fabric.launch.script import ScriptLauncher

_SubprocessScriptLauncher = ScriptLauncher
