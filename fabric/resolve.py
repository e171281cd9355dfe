"""Request (the user's flags) + Machine (facts) -> Plan. Each rule is one short function and a row of a table test."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fabric.accelerators.select import select_accelerator, select_devices
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.plugins.environments.cluster_environment import ClusterEnvironment
from fabric.plugins.environments.detect import detect_environment
from fabric.plugins.io.checkpoint_io import CheckpointIO
from fabric.plugins.precision.precision import Precision
from fabric.plugins.precision.select import make_precision
from fabric.strategies.registry import STRATEGY_REGISTRY
from fabric.strategies.strategy import Strategy

if TYPE_CHECKING:
    import torch

    from fabric.accelerators.accelerator import Accelerator

_FLAGS = ("accelerator", "strategy", "devices", "num_nodes", "precision")


@dataclass(frozen=True)
class Request:
    """What the user wrote."""

    accelerator: Any = "auto"
    strategy: Any = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Any = None
    plugins: Any = None


@dataclass(frozen=True)
class Machine:
    """What is so here, whatever the user wrote."""

    environment: ClusterEnvironment
    """Detected: who started this process."""
    flags: dict[str, str] = field(default_factory=dict)
    """What `fabric run` was given, by argument name."""
    interactive: bool = False
    """Whether this is a notebook or a prompt, where a script cannot be run again."""

    @classmethod
    def look(cls) -> Machine:
        """The machine as it is now."""
        given = {name: os.environ.get(f"FABRIC_{name.upper()}") for name in _FLAGS}
        return cls(
            environment=detect_environment(),
            flags={name: value for name, value in given.items() if value is not None},
            interactive=hasattr(sys, "ps1"),
        )


@dataclass(frozen=True)
class Plan:
    """Everything decided."""

    strategy: Strategy
    accelerator: Accelerator
    devices: list[torch.device]
    num_nodes: int
    precision: Precision
    environment: ClusterEnvironment
    checkpoint_io: CheckpointIO | None


def resolve(request: Request, machine: Machine) -> Plan:
    """Decide everything, or raise one error that names what contradicts what, and both ways out.

    Raises:
        ConfigurationError: Unknown names, contradictions, or what this machine does not have.
        ArgumentTypeError: An argument of the wrong kind.
    """
    request = merge_flags(request, machine.flags)
    precision_plugin, environment, checkpoint_io = sort_plugins(request.plugins)
    given = request.strategy if isinstance(request.strategy, Strategy) else None
    environment = choose_environment(environment, given, machine)
    accelerator = choose_accelerator(request.accelerator, given)
    devices, num_nodes = choose_devices(request, accelerator, environment, given)
    strategy = given or choose_strategy(request.strategy, len(devices) * num_nodes, environment, machine)
    check_accelerator(strategy, accelerator, request)
    precision = choose_precision(request.precision, precision_plugin, strategy, devices[0].type)
    checkpoint_io = choose_io(checkpoint_io, strategy)
    check_size(strategy, devices, num_nodes, request)
    check_interactive(strategy, environment, machine, len(devices))
    return Plan(strategy, accelerator, devices, num_nodes, precision, environment, checkpoint_io)


def merge_flags(request: Request, flags: dict[str, str]) -> Request:
    """The request with what `fabric run` was given; an argument in code that says otherwise is an error."""
    defaults = Request()
    for name, value in flags.items():
        written = getattr(request, name)
        if written != getattr(defaults, name) and str(written) != value:
            raise ConfigurationError(
                f"Fabric({name}={written!r}) contradicts {name}={value!r} from `fabric run` (FABRIC_{name.upper()}). "
                f"Remove {name}= from the code, or leave --{name.replace('_', '-')} out."
            )
        request = replace(request, **{name: int(value) if name == "num_nodes" else value})
    return request


def sort_plugins(
    plugins: Any,
) -> tuple[Precision | None, ClusterEnvironment | None, CheckpointIO | None]:
    """Precision, environment and checkpoint IO from `plugins=`, each at most once."""
    kinds = (Precision, ClusterEnvironment, CheckpointIO)
    found: list[Any] = [None, None, None]
    listed = [] if plugins is None else plugins if isinstance(plugins, list | tuple) else [plugins]
    for plugin in listed:
        position = next((i for i, kind in enumerate(kinds) if isinstance(plugin, kind)), None)
        if position is None:
            raise ArgumentTypeError(
                f"plugins= takes Precision, ClusterEnvironment and CheckpointIO objects, but got {plugin!r}."
            )
        if found[position] is not None:
            raise ConfigurationError(f"plugins= has two of {kinds[position].__name__}: keep one of them.")
        found[position] = plugin
    return found[0], found[1], found[2]


def choose_environment(
    plugin: ClusterEnvironment | None, strategy: Strategy | None, machine: Machine
) -> ClusterEnvironment:
    """The environment that was passed, once, or the detected one."""
    of_strategy = getattr(strategy, "cluster_environment", None)
    if plugin is not None and of_strategy is not None:
        raise _twice("cluster environment", "plugins=", f"{type(strategy).__name__}(cluster_environment=...)")
    return plugin or of_strategy or machine.environment


def choose_accelerator(choice: Any, strategy: Strategy | None) -> Accelerator:
    """The accelerator that was passed, once, or the one that the name means here."""
    of_strategy = strategy.given[0] if strategy is not None else None
    if of_strategy is not None and choice != "auto":
        raise _twice("accelerator", f"accelerator={choice!r}", f"{type(strategy).__name__}(accelerator=...)")
    if (
        of_strategy is None
        and choice == "auto"
        and strategy is not None
        and "cpu" in strategy.traits.accelerators[:1]
    ):
        choice = "cpu"
    return select_accelerator(of_strategy or choice)


def choose_devices(
    request: Request, accelerator: Accelerator, environment: ClusterEnvironment, strategy: Strategy | None
) -> tuple[list[torch.device], int]:
    """One device per process of this machine, and the number of machines; "auto" follows who started the processes."""
    nodes = _checked_nodes(request.num_nodes)
    listed = getattr(strategy, "parallel_devices", None)
    if listed:
        return list(listed), nodes
    own = strategy.topology.device if strategy is not None and not strategy.traits.needs_launch else None
    if own is not None and own.type != "cpu" and request.devices == "auto":
        return [own], nodes
    started = environment.creates_processes_externally
    wanted = request.devices
    if isinstance(wanted, str) and wanted.strip() == "auto" and started:
        wanted = environment.local_world_size() or wanted
        nodes = max(nodes, environment.num_nodes() or 1)
    devices = select_devices(accelerator, wanted)
    if started and request.strategy != "single_device":
        environment.validate_settings(num_devices=len(devices), num_nodes=nodes)
    return devices, nodes


def choose_strategy(
    choice: Any, world_size: int, environment: ClusterEnvironment, machine: Machine
) -> Strategy:
    """The strategy that the name means; "auto" is one device for one process, else DDP as it can start here."""
    if not isinstance(choice, str):
        raise ArgumentTypeError(
            f"strategy={choice!r} must be a name or a Strategy object, but is a {type(choice).__name__}. "
            f'Write strategy="ddp", or an object such as DDPStrategy().'
        )
    if choice == "auto":
        started = environment.creates_processes_externally
        several = "ddp_notebook" if machine.interactive and not started else "ddp"
        choice = several if world_size > 1 else "single_device"
    strategy: Strategy = STRATEGY_REGISTRY.get(choice)
    return strategy


def choose_precision(value: Any, plugin: Precision | None, strategy: Strategy, device_type: str) -> Precision:
    """The precision that was passed, once, or the one that the name means on this device."""
    of_strategy = strategy.given[2]
    sources = {
        f"precision={value!r}": value,
        f"plugins={type(plugin).__name__}": plugin,
        f"{type(strategy).__name__}(precision=...)": of_strategy,
    }
    named = [name for name, source in sources.items() if source is not None]
    if len(named) > 1:
        raise _twice("precision", named[0], named[1])
    precision = plugin or of_strategy or make_precision(32 if value is None else value, device_type)
    allowed = strategy.traits.precisions
    if allowed and precision.precision not in allowed:
        raise ConfigurationError(
            f"{type(strategy).__name__} does not run with precision={precision.precision!r}. "
            f"Write one of {', '.join(map(repr, allowed))}, or another strategy."
        )
    return precision


def choose_io(plugin: CheckpointIO | None, strategy: Strategy) -> CheckpointIO | None:
    """The checkpoint IO that was passed, once; None keeps the strategy's."""
    if plugin is not None and strategy.given[1] is not None:
        raise _twice(
            "checkpoint IO",
            f"plugins={type(plugin).__name__}",
            f"{type(strategy).__name__}(checkpoint_io=...)",
        )
    return plugin


def check_accelerator(strategy: Strategy, accelerator: Accelerator, request: Request) -> None:
    """Raise if the strategy does not run on the accelerator."""
    allowed = strategy.traits.accelerators
    if allowed and accelerator.name() not in allowed:
        raise ConfigurationError(
            f"strategy={_name(request.strategy)} runs on {', '.join(allowed)} only, but accelerator={_name(request.accelerator)} "
            f'is {accelerator.name()} here. Write another strategy ("ddp" runs on every device), or run where there is one.'
        )


def check_size(strategy: Strategy, devices: list[torch.device], num_nodes: int, request: Request) -> None:
    """Raise if one process was asked to hold several devices."""
    if (
        not strategy.traits.needs_launch
        and not strategy.traits.data_parallel
        and len(devices) * num_nodes > 1
    ):
        raise ConfigurationError(
            f"strategy={_name(request.strategy)} runs one process on one device, but devices={request.devices!r} and "
            f'num_nodes={num_nodes} ask for {len(devices) * num_nodes}. Write devices=1, or strategy="ddp".'
        )


def check_interactive(
    strategy: Strategy, environment: ClusterEnvironment, machine: Machine, processes: int
) -> None:
    """Raise if processes would have to be started by running a notebook again."""
    method = getattr(strategy, "start_method", None)
    if (
        machine.interactive
        and method == "popen"
        and processes > 1
        and not environment.creates_processes_externally
    ):
        raise ConfigurationError(
            'This is a notebook or a prompt: there is no script that strategy="ddp" could run again for the other ranks. '
            'Write strategy="ddp_notebook" and fabric.launch(function), or put the code into a script.'
        )


def _checked_nodes(num_nodes: Any) -> int:
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
        raise ConfigurationError(f"num_nodes={num_nodes!r} must be a whole number of machines, 1 or more.")
    return num_nodes


def _twice(what: str, first: str, second: str) -> ConfigurationError:
    return ConfigurationError(f"The {what} is given twice: by {first} and by {second}. Keep one of the two.")


def _name(value: Any) -> str:
    return repr(value) if isinstance(value, str) else type(value).__name__
