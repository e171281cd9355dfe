"""`ScriptLauncher`: runs the user's command again for each further rank; `python train.py` is rank zero."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import LaunchError
from fabric.launch.launcher import Launcher
from fabric.launch.rank_env import first_rank_env_of
from fabric.launch.signals import flush_output
from fabric.launch.system import require_posix

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabric.plugins.environments.local import LocalEnvironment


class ScriptLauncher(Launcher):
    """Starts the ranks of this machine by running the original command again.

    Args:
        environment: The environment of this process, which becomes the first rank of its machine.
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
        """Start the other ranks of this machine, unless a launcher did, and call `function`.

        Raises:
            LaunchError: There is no command for other ranks, as in a notebook, a prompt, a script on standard
                input or a test of pytest.
        """
        multiple = self.num_processes * self.num_nodes > 1
        if multiple and not self.environment.creates_processes_externally:
            require_posix()
            argv, directory = original_command()
            first, listener = first_rank_env_of(self.environment, self.num_processes, self.num_nodes)
            _check_not_in_pytest()
            from fabric.launch.rank_zero import start_other_ranks

            flush_output()  # before the other ranks print
            start_other_ranks([*argv, *_hydra_overrides()], directory, first, listener)
        return function(*args, **kwargs) if function is not None else None


def original_command() -> tuple[list[str], str | None]:
    """Return the command line of this process with the interpreter's path, and the start directory.

    Raises:
        LaunchError: There is no command that can be run again.
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
        process = multiprocessing.current_process()
        fix = 'Put what the script does under `if __name__ == "__main__":`.'
        if not getattr(process, "_inheriting", False):  # its function calls launch(), not an import
            fix = 'Put the loop into a function and use strategy="ddp_spawn" with fabric.launch(function).'
        raise LaunchError(f"{process.name} cannot start ranks. {fix}")
    index = _script_index(original)
    flags = [flag for flag in original[1:index] if flag != "-i"]
    argv, directory = [sys.executable, *flags, *original[index:]], None
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if spec is not None and spec.origin == sys.argv[0]:
        # python -m: the module is found from the start directory, if sys.path still begins with it.
        module = spec.name.removesuffix(".__main__")
        argv = [sys.executable, *flags, "-m", module, *_arguments(original[index:], module, True)]
        start = sys.path[0] if sys.path else ""
        if str(Path(start, *spec.name.split(".")).with_suffix(".py")) == spec.origin:
            directory = start
    elif file and original[index : index + 1] == sys.argv[:1]:
        # The script may have changed its directory; the ranks must start in the original one.
        archive = Path(file).parent  # of `python app.zip`, whose file is app.zip/__main__.py
        script, absolute = sys.argv[0], str((archive if archive.is_file() else Path(file)).absolute())
        argv[1 + len(flags)] = absolute
        if not Path(script).is_absolute() and absolute.endswith(script.removeprefix("./")):
            directory = absolute[: -len(script.removeprefix("./"))] or None
    elif sys.argv[0] != "-c" and (file or spec) and Path(sys.argv[0]).exists():
        # A debugger or profiler runs the script; the other ranks run it without.
        arguments, script = _arguments(original[index:], sys.argv[0]), str(Path(sys.argv[0]).absolute())
        argv = [sys.executable, *flags, *_coverage(original, len(arguments)), script, *arguments]
    return argv, directory


def _arguments(command: list[str], target: str, is_module: bool = False) -> list[str]:
    """Return the arguments of a script or module in a command line; `sys.argv` may lack those that the script
    has parsed.

    The options of a debugger or profiler may name the script, too. A name that follows no option is the
    script's own.
    """
    if is_module:
        name = re.compile(rf"-\w*m ?{re.escape(target)}(\.__main__)?")  # also -mpackage
        words = enumerate(zip(["", *command], command, strict=False))
        places = [at for at, (m, word) in words if name.fullmatch(word) or name.fullmatch(f"{m} {word}")]
    else:
        named = [at for at, word in enumerate(command) if word == target]
        free = [at for at in named if at == 0 or not command[at - 1].startswith("-")]
        places = free or [at for at in named if command[at + 1 :] == sys.argv[1:]] or named
    arguments = command[places[0] + 1 :] if places else sys.argv[1:]
    return arguments[1:] if arguments[:1] == ["---"] else arguments  # scalene's mark of their beginning


def _coverage(original: list[str], arguments: int) -> list[str]:
    """Return arguments before the script that make `coverage run` measure other ranks, if it measures this
    one; else []. Each rank writes its own file. The script has `arguments` arguments.
    """
    coverage = sys.modules.get("coverage")
    if coverage is None or coverage.Coverage.current() is None or "run" not in original:
        return []
    begin, end = original.index("run") + 1, len(original) - arguments - 1
    if original[end : end + 1] != sys.argv[:1]:
        return []  # a run of a module, or of programs that its configuration names
    options = [option for option in original[begin:end] if option not in ("-p", "--parallel-mode")]
    if len(options) == end - begin:
        print(
            "fabric: `coverage run` without -p measures rank zero into .coverage, and each other rank into a "
            "file of its own. Write `coverage run -p`, or `coverage combine --append` at the end.",
            file=sys.stderr,
        )
    return ["-m", "coverage", "run", "-p", *options]


def _hydra_overrides() -> list[str]:
    """Return the arguments that make Hydra use rank zero's output directory in the other ranks, too."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return []
    config = hydra.HydraConfig.get()
    multiple = "MULTIRUN" in str(config.mode)
    path = str(Path(config.runtime.cwd, config.sweep.dir) if multiple else config.runtime.output_dir)
    quoted = path.replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.{'sweep' if multiple else 'run'}.dir='{quoted}'", "hydra.output_subdir=null"]


def _check_not_in_pytest() -> None:
    """Raise in a test of pytest."""
    if "PYTEST_CURRENT_TEST" in os.environ and "pytest" in sys.modules:
        raise LaunchError(
            "This is a test of pytest, so other ranks would run the whole session. Put the loop into a "
            'function of a module and use strategy="ddp_spawn" (or "ddp_fork") with fabric.launch(function).'
        )


def _script_index(argv: list[str]) -> int:
    """Return the index of the script, of -m or of -c in a command line of Python."""
    index = 1
    while index < len(argv) and argv[index].startswith("-"):
        if re.match("-[^-cmXW]*[cm]", argv[index]):  # also as -um, -mpackage
            break
        index += 2 if re.fullmatch("-[^-cmXW]*[XW]|--check-hash-based-pycs", argv[index]) else 1
    return index
