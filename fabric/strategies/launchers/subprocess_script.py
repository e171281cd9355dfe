"""Lightning Fabric has `_SubprocessScriptLauncher` under this path."""

from fabric.strategies.launchers.script import ScriptLauncher

_SubprocessScriptLauncher = ScriptLauncher
