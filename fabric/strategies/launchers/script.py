"""Runs the user's own command once more for every rank: `python train.py` becomes the supervisor of all."""

from __future__ import annotations

import builtins
import multiprocessing
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import LaunchError
from fabric.processes.signals import flush_output
from fabric.processes.system import require_posix
from fabric.strategies.launchers.launcher import Launcher
from fabric.strategies.launchers.place import place_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabric.plugins.environments.local import LocalEnvironment


class ScriptLauncher(Launcher):
    """Starts the ranks of this machine by running the original command again.

    Args:
        environment: Of this process, which is no rank.
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
        """In a rank, and where there is but one: call `function`. Else run all ranks to their end, and exit.

        Raises:
            LaunchError: There is no command to run again (notebook, prompt, script on standard input).
            SystemExit: With the exit code of the job.
        """
        several = self.num_processes * self.num_nodes > 1
        if several and not self.environment.creates_processes_externally:
            require_posix()
            argv, directory = original_command()
            place, listener = place_here(self.environment, self.num_processes, self.num_nodes)
            from fabric.strategies.launchers.commands import run_commands

            flush_output()  # before what the ranks print
            sys.exit(run_commands(argv, place, listener, {}, "script", directory))
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
    argv, directory = [sys.executable, *original[1:]], None
    file = getattr(main, "__file__", None)
    if (spec := getattr(main, "__spec__", None)) is not None:
        # python -m: found from the directory of the start, if nobody has put another one before it.
        start = sys.path[0] if sys.path else ""
        if str(Path(start, *spec.name.split(".")).with_suffix(".py")) == spec.origin:
            directory = start
    elif file and sys.argv[0] in argv:
        # The script may have left its directory; the ranks start where this process did.
        given, absolute = sys.argv[0], str(Path(file).absolute())
        argv[argv.index(given)] = absolute
        if not Path(given).is_absolute() and absolute.endswith(given.removeprefix("./")):
            directory = absolute[: -len(given.removeprefix("./"))] or None
    return argv, directory
