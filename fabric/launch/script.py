"""Runs the user's own command once for each further rank: the process of `python train.py` is rank zero."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import LaunchError
from fabric.launch.launcher import Launcher
from fabric.launch.rank_env import place_here
from fabric.launch.signals import flush_output
from fabric.launch.system import require_posix

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabric.plugins.environments.local import LocalEnvironment


class ScriptLauncher(Launcher):
    """Starts the ranks of this machine by running the original command again.

    Args:
        environment: Of this process, which becomes the first rank of its machine.
        num_processes: Ranks on this machine.
        num_nodes: Machines; with more than one the same command is run by hand on each, with MASTER_ADDR,
            MASTER_PORT and NODE_RANK set.
    """

    start_method = "popen"

    def __init__(self, environment: LocalEnvironment, num_processes: int, num_nodes: int = 1) -> None:
        self.environment = environment
        self.num_processes = num_processes
        self.num_nodes = num_nodes

    def launch(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Start the other ranks of this machine, unless they are there, and call `function` in each.

        Raises:
            LaunchError: There is no command for the others to run: a notebook, a prompt, a script on standard
                input, a test of pytest.
        """
        several = self.num_processes * self.num_nodes > 1
        if several and not self.environment.creates_processes_externally:
            require_posix()
            argv, directory = original_command()
            place, listener = place_here(self.environment, self.num_processes, self.num_nodes)
            _refuse_in_test()
            from fabric.launch.rank_zero import start_others

            flush_output()  # before what the others print
            start_others([*argv, *_hydra_overrides()], directory, place, listener)
        return function(*args, **kwargs) if function is not None else None


def original_command() -> tuple[list[str], str | None]:
    """The command line of this process with the interpreter's own path, and the directory it was started in.

    Raises:
        LaunchError: There is none that can be run again.
    """
    main, original = sys.modules["__main__"], list(sys.orig_argv)
    interactive = hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
    if interactive or sys.argv[:1] in ([""], ["-"]):
        where = "a notebook or prompt" if interactive else "a script on standard input"
        raise LaunchError(
            f"This is {where}: there is no command that the ranks could run. Put the loop into a "
            f'function and use strategy="ddp_notebook" (or "ddp_fork") with fabric.launch(function), or save '
            f"it as a file."
        )
    if multiprocessing.parent_process() is not None:
        way = 'Put what the script does under `if __name__ == "__main__":`.'
        raise LaunchError(f"{multiprocessing.current_process().name} cannot start ranks. {way}")
    place = _target(original)
    flags = [flag for flag in original[1:place] if flag != "-i"]
    argv, directory = [sys.executable, *flags, *original[place:]], None
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if spec is not None and spec.origin == sys.argv[0]:
        # python -m: found from the directory of the start, if nobody has put another one before it.
        argv = [sys.executable, *flags, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
        start = sys.path[0] if sys.path else ""
        if str(Path(start, *spec.name.split(".")).with_suffix(".py")) == spec.origin:
            directory = start
    elif file and original[place : place + 1] == sys.argv[:1]:
        # The script may have left its directory; the ranks start where this process did.
        given, absolute = sys.argv[0], str(Path(file).absolute())
        argv[1 + len(flags)] = absolute
        if not Path(given).is_absolute() and absolute.endswith(given.removeprefix("./")):
            directory = absolute[: -len(given.removeprefix("./"))] or None
    elif sys.argv[0] != "-c" and (file or spec) and Path(sys.argv[0]).exists():
        # A debugger or profiler runs the script; the others run it without.
        argv = [sys.executable, *flags, str(Path(sys.argv[0]).absolute()), *sys.argv[1:]]
    return argv, directory


def _hydra_overrides() -> list[str]:
    """Return the arguments by which Hydra uses rank zero's output directory in the other ranks, too."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return []
    config = hydra.HydraConfig.get()
    several = "MULTIRUN" in str(config.mode)
    path = str(Path(config.runtime.cwd, config.sweep.dir) if several else config.runtime.output_dir)
    quoted = path.replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.{'sweep' if several else 'run'}.dir='{quoted}'", "hydra.output_subdir=null"]


def _refuse_in_test() -> None:
    """Raise in a test of pytest."""
    if "PYTEST_CURRENT_TEST" in os.environ and "pytest" in sys.modules:
        raise LaunchError(
            "This is a test of pytest, and other ranks would run the whole session. Put the loop into a "
            'function of a module and use strategy="ddp_spawn" (or "ddp_fork") with fabric.launch(function).'
        )


def _target(argv: list[str]) -> int:
    """The place of the script, of -m or of -c in a command line of Python."""
    place = 1
    while place < len(argv) and argv[place].startswith("-"):
        if argv[place][-1] in "mc":  # also as -um
            break
        place += 2 if argv[place] in ("-X", "-W", "--check-hash-based-pycs") else 1
    return place
