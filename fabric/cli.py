"""The command line. `fabric run` starts the ranks of this machine and supervises them, without importing
torch. Other commands are those of slices, whose `arguments` modules add their parsers.
"""

from __future__ import annotations

# PYTHON_ARGCOMPLETE_OK
import argparse
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fabric.accelerators.devices import ALL, read_devices
from fabric.core.errors import ConfigurationError, FabricError
from fabric.core.messages import print_line
from fabric.core.registry import did_you_mean
from fabric.core.slices import find_slice, use_slice
from fabric.launch.commands import run_commands
from fabric.launch.rank_env import first_rank_env
from fabric.launch.rank_logs import RankLogs
from fabric.launch.rank_prefix import OTHER_RANKS, PREFIX_RANKS
from fabric.launch.system import require_posix

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from fabric.launch.rank_env import RankEnv

DEFAULT_PORT = 29400
"""Port of rank zero with several machines; on one machine the kernel chooses a free one."""
LOG_DIR = "FABRIC_LOG_DIR"
"""Variable with the meaning of --log-dir."""
_ADVICE = 'Write a number (--devices 2), a list (--devices 0,1, or "0," for device 0 alone) or auto.'


class Option(NamedTuple):
    """An option of `fabric run` with a value."""

    default: str
    help: str
    variable: str = ""
    """Variable with the default, for rendezvous options; others are passed as FABRIC_<NAME>."""


_OPTIONS = {
    "accelerator": Option("auto", '"cpu", "cuda", "mps", ...; default: auto'),
    "strategy": Option("auto", '"ddp", ...; default: auto'),
    "devices": Option("auto", 'a number, a list ("0,1") or auto; default: auto'),
    "num_nodes": Option("1", "machines; start the same command on each; default: 1"),
    "precision": Option("32-true", '"32-true", "bf16-mixed", ...; default: the script\'s own'),
    "node_rank": Option("0", "which of the machines this is; default: 0", "NODE_RANK"),
    "main_address": Option("127.0.0.1", "the machine of node rank 0", "MASTER_ADDR"),
    "main_port": Option("0", f"its port; default: {DEFAULT_PORT}, on one machine a free one", "MASTER_PORT"),
}


class Setting(NamedTuple):
    """A value as text, and its source: "command line", a variable's name, or "default"."""

    value: str
    source: str


_FOREIGN_OPTIONS = {
    "-d": "--devices", "-n": "--devices", "-np": "--devices",
    "--nproc-per-node": "--devices", "--nproc_per_node": "--devices",
    "--num-processes": "--devices", "--num_processes": "--devices", "--nnodes": "--num-nodes",
    "--master-addr": "--main-address", "--master_addr": "--main-address", "--master-port": "--main-port",
    "--master_port": "--main-port", "-l": "--prefix-ranks", "--label": "--prefix-ranks",
    "--tag-output": "--prefix-ranks", "--mixed-precision": "--precision", "--mixed_precision": "--precision",
}  # fmt: skip
"""Options of torchrun, mpirun and other launchers, with the equivalent of `fabric run`."""
_FOREIGN_COMMANDS = {
    "launch": "run", "start": "run", "estimate-memory": "plan", "merge-weights": "consolidate",
}  # fmt: skip
"""Commands of Accelerate and others, with the equivalent of `fabric`."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors contain what to write instead, and whose help ends with examples.

    Args:
        epilog: The examples, one a line.
    """

    def __init__(self, *args: Any, epilog: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = epilog.splitlines()

    def format_help(self) -> str:
        """Return the help with the examples, whose lines are not wrapped."""
        shown = "".join([f"  {line}\n" for line in self.examples])
        return super().format_help() + (f"\nexamples:\n{shown}" if shown else "")

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with 2."""
        unknown = re.search(r"unrecognized arguments: ([^\s=]+)", message)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            equivalent = _FOREIGN_OPTIONS.get(re.sub(r"^(-\w+?)\d+$", r"\1", unknown[1]))  # -n2
            hint = did_you_mean(unknown[1], known)
            message += f". Write {equivalent}." if equivalent in known else f".{hint}"
        if choice := re.search(r"invalid choice: '([^']+)'", message):
            command = _FOREIGN_COMMANDS.get(choice[1])
            message += f". Write fabric {command}." if command else f".{did_you_mean(choice[1], _COMMANDS)}"
        super().error(message)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Return the options; the command's parser reports unknown ones."""
        options, unknown = self.parse_known_args(*args, **kwargs)
        if unknown:
            commands = next(action.choices for action in self._actions if action.dest == "command")
            parser = commands[options.command] if options.command else self  # type: ignore[index]
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, the failing rank's, or 2 for wrong usage."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell with: eval "$(register-python-argcomplete fabric)"
        import_module("argcomplete").autocomplete(parser)
    own = [name for action in parser._actions for name in action.option_strings]
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and (given[0].endswith(".py") or (given[0][:1] == "-" and given[0] not in own)):
        parser.error(f"{given[0]} is not a command. Write fabric run {shlex.join(given)}.")
    if len(given) == 2 and given[0] == "help":
        given = [given[1], "--help"]
    options = parser.parse_args(given)
    if options.command in (None, "help"):
        parser.print_help()
        return 0
    try:
        return _COMMANDS[options.command](options)
    except FabricError as error:
        print(f"fabric {options.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fabric", description="Minimal distributed PyTorch.")
    parser.add_argument("-V", "--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a script on several processes",
        description="Start a script (or -m module) on several processes; Fabric(...) in it joins them.",
        usage="fabric run [options] (script.py | -m module) [arguments of the script]",
        epilog="fabric run --devices 2 train.py --lr 0.1\n"
        "fabric run --devices 0,1 -m train\n"
        "fabric run --devices 8 --num-nodes 2 --node-rank 0 --main-address 10.0.0.1 train.py",
        allow_abbrev=False,
    )
    for name, option in _OPTIONS.items():
        run.add_argument(f"--{name.replace('_', '-')}", help=option.help, metavar=name.split("_")[-1].upper())
    run.add_argument(
        "--log-dir", metavar="DIR", help="also write what each rank prints to DIR/rank0.out, rank0.err, ..."
    )
    run.add_argument(
        "--prefix-ranks",
        action=argparse.BooleanOptionalAction,
        help="begin each printed line with [rank 1], also on rank 0; default: on all ranks but 0",
    )
    run.add_argument("--report", metavar="DIR", help="record the run: each rank appends its steps to a file")
    run.add_argument("--verbose", action="store_true", help="print each setting and its source")
    commands.add_parser("help")  # prints the same as --help
    for name in ("check", "consolidate", "doctor", "report", "plan"):
        if (arguments := find_slice(f"{name} arguments")) is not None:
            arguments.add_command(commands)
    for command in [commands.choices[name] for name in ("run", "check", "plan") if name in commands.choices]:
        command.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module, like python -m")
        command.add_argument("script", nargs="?", help="the script")
        command.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def _doctor(options: argparse.Namespace) -> int:
    options.accelerator = options.accelerator or os.environ.get("FABRIC_ACCELERATOR", "auto")
    return int(use_slice("doctor").doctor(options, count_processes))


def _report(options: argparse.Namespace) -> int:
    return int(use_slice("report command").run_report(options))


def _plan(options: argparse.Namespace) -> int:
    return int(use_slice("plan").run_plan(options, _command_line(options)[1:]))


def _consolidate(options: argparse.Namespace) -> int:
    return int(use_slice("consolidate arguments").run_consolidate(options))


def _versions() -> str:
    found = []
    for name in ("torch-fabric", "torch"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # a checkout on the path
            found.append(f"{name} without a version")
    return ", ".join([*found, f"Python {sys.version.split()[0]}"])


def _check(options: argparse.Namespace) -> int:
    numbers = {name: Setting(getattr(options, name), f"--{name}") for name in ("devices", "steps")}
    ranks, steps = (
        _parse_count(numbers["devices"], "--devices", 2),
        _parse_count(numbers["steps"], "--steps", 1),
    )
    return int(use_slice("check").check(_command_line(options)[1:], ranks, steps))


def _run(options: argparse.Namespace) -> int:
    require_posix()
    argv = _command_line(options)
    settings = effective_settings(vars(options), os.environ)
    devices, nodes = settings["devices"].value, _parse_count(settings["num_nodes"], "--num-nodes", 1)
    count = count_processes(devices, settings["accelerator"].value)
    if options.verbose:
        _print_settings(settings, count, nodes)
    rank_env, listener = _first_rank_env(settings, count, nodes)
    # Only options of the command line: the arguments of Fabric(...) in the script decide the rest.
    variables = {
        f"FABRIC_{name.upper()}": settings[name].value
        for name, option in _OPTIONS.items()
        if not option.variable and settings[name].source == "command line"
    }
    if options.report is not None:
        variables["FABRIC_REPORT"] = options.report
    logs = None
    if directory := options.log_dir or os.environ.get(LOG_DIR):
        logs = RankLogs(Path(directory))
        variables |= {"PYTHONUNBUFFERED": "1", PREFIX_RANKS: ""}  # Python buffers output to a pipe
    elif options.prefix_ranks is not None or PREFIX_RANKS not in os.environ:
        variables[PREFIX_RANKS] = {None: OTHER_RANKS, True: "1", False: ""}[options.prefix_ranks]
    return run_commands(argv, rank_env, listener, variables, "cli", logs=logs)


def _warn_of_misplaced_options(options: argparse.Namespace) -> None:
    """Warn if all options of a command are written after the script, which gets them."""
    own: Any = dict.fromkeys(_OPTIONS, (None, ""))
    if options.command != "run":
        own = use_slice(f"{options.command} arguments").OPTIONS
    if any([getattr(options, name) != default for name, (default, _) in own.items()]):
        return  # the script has options of these names
    arguments = options.module[1:] if options.module else options.arguments
    for name in own:
        option = f"--{name.replace('_', '-')}"
        if given := [one for one in arguments if one == option or one.startswith(f"{option}=")]:
            print_line(
                f"{given[0]} after the script is an argument of the script. If it was meant for "
                f"fabric {options.command}, write it before: fabric {options.command} {option} ... train.py."
            )


def effective_settings(
    options: Mapping[str, str | None], environment: Mapping[str, str]
) -> dict[str, Setting]:
    """Return each setting with its source: the command line, a variable, or the default."""
    settings = {}
    for name, option in _OPTIONS.items():
        variable = option.variable or f"FABRIC_{name.upper()}"
        from_options, from_environment = options.get(name), environment.get(variable)
        settings[name] = Setting(option.default, "default")
        if from_options is not None:
            settings[name] = Setting(from_options, "command line")
        elif from_environment:
            settings[name] = Setting(from_environment, variable)
    return settings


def count_processes(devices: str, accelerator: str = "auto") -> int:
    """Return the number of ranks on this machine for `--devices`.

    Args:
        devices: "auto", "-1", a number, or a list such as "0,1" or "0,".
        accelerator: For "cpu" auto means 1; otherwise the number of devices that torch sees, at least 1.

    Raises:
        ConfigurationError: It is none of these, or names no device.
    """
    parsed = read_devices(devices, _ADVICE)
    if parsed == ALL:
        return 1 if accelerator == "cpu" else max(1, _count_devices_in_subprocess())
    count = parsed if isinstance(parsed, int) else len(set(parsed or []))
    if count < 1 or (isinstance(parsed, list) and count < len(parsed)):
        raise ConfigurationError(f"devices={devices!r} names no device, or one twice. {_ADVICE}")
    return count


def _count_devices_in_subprocess() -> int:
    """Return the number of devices that torch sees, in a separate process. Takes seconds."""
    code = "import torch; print('', torch.accelerator.device_count())"
    try:
        output = subprocess.check_output([sys.executable, "-c", code], stderr=subprocess.DEVNULL, timeout=300)
        return int(output.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0  # the ranks raise the error of importing torch


def _command_line(options: argparse.Namespace) -> list[str]:
    _warn_of_misplaced_options(options)
    if options.module is not None:
        if not options.module:
            raise ConfigurationError(
                f"-m needs the name of a module. Write fabric {options.command} -m package.train."
            )
        return [sys.executable, "-m", *options.module]
    if options.script is None:
        raise ConfigurationError(
            f"There is nothing to run. Write fabric {options.command} [options] train.py [arguments]."
        )
    if re.fullmatch(r"python[\d.]*", Path(options.script).name):
        raise ConfigurationError(
            f"{options.script} is not a script. Leave it out: `fabric {options.command}` starts Python."
        )
    if not Path(options.script).exists():
        raise ConfigurationError(
            f"The script {options.script!r} does not exist (looked in {Path.cwd()})."
            f"{_similar_file(options.script)} Write the path of a "
            f"Python file after the options of fabric {options.command}, or use -m for a module."
        )
    return [sys.executable, options.script, *options.arguments]


def _similar_file(script: str) -> str:
    """Return a sentence with the Python files whose names are similar; or ""."""
    files = [str(path) for path in Path(script).parent.glob("*.py")]
    return did_you_mean(script, files)


def _first_rank_env(
    settings: Mapping[str, Setting], count: int, nodes: int
) -> tuple[RankEnv, socket.socket | None]:
    """Return the variables of this machine's first rank, and on node 0 the listening socket of the job."""
    node_rank = _parse_count(settings["node_rank"], "--node-rank", 0)
    port = _parse_count(settings["main_port"], "--main-port", 0)
    address = settings["main_address"].value
    if node_rank >= nodes:
        raise ConfigurationError(
            f"--node-rank {node_rank} is not below --num-nodes {nodes}. Count machines from 0."
        )
    if nodes > 1 and settings["main_address"].source == "default":
        raise ConfigurationError(
            f"--num-nodes {nodes} needs --main-address: the name or address of the machine with --node-rank "
            "0, as seen by the others. Write it on every machine."
        )
    return first_rank_env(count, nodes, node_rank, address, port or (DEFAULT_PORT if nodes > 1 else 0))


def _parse_count(setting: Setting, option: str, least: int) -> int:
    text = str(setting.value).strip()
    if not text.isdigit() or int(text) < least:
        raise ConfigurationError(
            f"{option} {setting.value} (from {setting.source}) must be a whole number, at least {least}."
        )
    return int(text)


def _print_settings(settings: Mapping[str, Setting], count: int, nodes: int) -> None:
    for name, setting in settings.items():
        print_line(f"{name} = {setting.value} ({setting.source})")
    print_line(f"{count * nodes} ranks, {count} of them on this machine")


_COMMANDS = {"run": _run, "check": _check, "consolidate": _consolidate, "doctor": _doctor}
_COMMANDS |= {"plan": _plan, "report": _report}

if __name__ == "__main__":
    sys.exit(main())
