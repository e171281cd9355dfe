"""Request (the user's flags) + Machine (facts) -> Plan. Each rule is a short function and a row of a test."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fabric.accelerators.select import ACCELERATOR_REGISTRY, first_device, select_accelerator, select_devices
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.precision import find_policy
from fabric.plugins.environments.cluster_environment import ClusterEnvironment
from fabric.plugins.environments.detect import find_environment
from fabric.plugins.io.checkpoint_io import CheckpointIO
from fabric.plugins.precision.precision import Precision
from fabric.plugins.precision.select import make_precision
from fabric.strategies.registry import STRATEGY_REGISTRY
from fabric.strategies.strategy import Plan, Strategy

if TYPE_CHECKING:
    import torch

    from fabric.accelerators.accelerator import Accelerator

_log = logging.getLogger(__name__)
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
    reason: str = ""
    """Why it is this environment."""
    forced: str | None = None
    """FABRIC_ENVIRONMENT, if that decided."""

    @classmethod
    def look(cls) -> Machine:
        """The machine as it is now."""
        given = {name: os.environ.get(f"FABRIC_{name.upper()}") for name in _FLAGS}
        found = find_environment()
        return cls(
            environment=found.environment,
            flags={name: value for name, value in given.items() if value},
            interactive=hasattr(sys, "ps1"),
            reason=found.why,
            forced=found.forced,
        )


def resolve(request: Request, machine: Machine) -> Plan:
    """Decide everything, or raise one error that names what contradicts what, and both ways out.

    Raises:
        ConfigurationError: Unknown names, contradictions, or what this machine does not have.
        ArgumentTypeError: An argument of the wrong kind.
    """
    request = lower_names(merge_flags(request, machine.flags))
    precision_plugin, environment_plugin, io_plugin = sort_plugins(request.plugins)
    named = name_strategy(request.strategy)
    environment = choose_environment(environment_plugin, named, machine)
    accelerator = choose_accelerator(request.accelerator, named, environment.elsewhere)
    nodes = choose_nodes(request, environment, named)
    devices = choose_devices(request, accelerator, environment, named)
    processes = count_processes(devices, named)
    check_started(environment, named, processes, nodes)
    strategy = named or auto_strategy(len(devices) * nodes, environment, machine)
    check_accelerator(strategy, accelerator, devices[0].type, request)
    check_size(strategy, devices, nodes, request)
    check_interactive(strategy, environment, machine, processes, request)
    precision = choose_precision(request.precision, precision_plugin, strategy, devices[0].type)
    return Plan(strategy, accelerator, devices, nodes, precision, environment, choose_io(io_plugin, strategy))


def merge_flags(request: Request, flags: dict[str, str]) -> Request:
    """The request with what `fabric run` was given; an argument in code that says otherwise is an error."""
    defaults = Request()
    for name, value in flags.items():
        written = getattr(request, name)
        if value == "auto" or _spelled(name, written) == _spelled(name, value):
            continue
        if written != getattr(defaults, name):
            raise ConfigurationError(
                f"Fabric({name}={written!r}) contradicts {name}={value!r} from `fabric run` "
                f"(FABRIC_{name.upper()}). Remove {name}= from the code, or leave --{name.replace('_', '-')} "
                "out."
            )
        read: Any = _read_nodes(value) if name == "num_nodes" else value
        request = replace(request, **{name: read})
    return request


def lower_names(request: Request) -> Request:
    """The request with "DDP" and "CPU" as "ddp" and "cpu", unless somebody registered them so."""
    registries = {"strategy": STRATEGY_REGISTRY, "accelerator": ACCELERATOR_REGISTRY}
    written = {name: getattr(request, name) for name in registries}
    lowered: dict[str, Any] = {
        name: value.lower()
        for name, value in written.items()
        if isinstance(value, str) and not value.islower() and value not in registries[name]
    }
    return replace(request, **lowered)


def sort_plugins(
    plugins: Any,
) -> tuple[Precision | None, ClusterEnvironment | None, CheckpointIO | None]:
    """Precision, environment and checkpoint IO from `plugins=`, each at most once."""
    found: dict[type, Any] = dict.fromkeys((Precision, ClusterEnvironment, CheckpointIO))
    listed = [] if plugins is None else plugins if isinstance(plugins, list | tuple) else [plugins]
    for plugin in listed:
        kind = next((kind for kind in found if isinstance(plugin, kind)), None)
        if kind is None:
            raise ArgumentTypeError(
                f"plugins= takes Precision, ClusterEnvironment and CheckpointIO objects, but got {plugin!r}."
            )
        if found[kind] is not None:
            raise ConfigurationError(f"plugins= has two of {kind.__name__}: keep one of them.")
        found[kind] = plugin
    return found[Precision], found[ClusterEnvironment], found[CheckpointIO]


def name_strategy(choice: Any) -> Strategy | None:
    """The strategy that was passed or that the name means; None for "auto", which needs the devices."""
    if isinstance(choice, Strategy):
        return choice
    if not isinstance(choice, str):
        raise ArgumentTypeError(
            f"strategy={choice!r} must be a name or a Strategy object, but is a {type(choice).__name__}. "
            f'Write strategy="ddp", or an object such as DDPStrategy().'
        )
    made = None if choice == "auto" else STRATEGY_REGISTRY.get(choice)
    if made is not None and not isinstance(made, Strategy):
        raise ArgumentTypeError(
            f"strategy={choice!r} is registered, but its factory made {made!r}. Register a Strategy "
            "subclass, or a function that returns an object of one."
        )
    return made


def choose_environment(
    plugin: ClusterEnvironment | None, strategy: Strategy | None, machine: Machine
) -> ClusterEnvironment:
    """The environment that was passed, once, or the detected one; logs which and why."""
    of_strategy = getattr(strategy, "cluster_environment", None)
    source = f"{type(strategy).__name__}(cluster_environment=...)"
    if plugin is not None and of_strategy is not None:
        raise _twice("cluster environment", "plugins=", source)
    given, source = (of_strategy, source) if plugin is None else (plugin, f"plugins={type(plugin).__name__}")
    if given is None:
        given, source = machine.environment, machine.reason
    elif machine.forced and not isinstance(given, type(machine.environment)):
        raise _twice("cluster environment", source, f"FABRIC_ENVIRONMENT={machine.forced}")
    _log.debug("The cluster environment is %s: %s.", type(given).__name__, source)
    return given


def choose_accelerator(choice: Any, strategy: Strategy | None, elsewhere: bool = False) -> Accelerator:
    """The accelerator that was passed, once, or that the name means here; "auto" heeds the strategy."""
    if strategy is None or elsewhere:
        return select_accelerator(choice, False) if elsewhere else select_accelerator(choice)
    of_strategy, automatic = strategy.given[0], isinstance(choice, str) and choice == "auto"
    if of_strategy is not None:
        if not automatic:
            raise _twice(
                "accelerator", f"accelerator={choice!r}", f"{type(strategy).__name__}(accelerator=...)"
            )
        return select_accelerator(of_strategy)
    own = _own_device(strategy)
    chosen = select_accelerator(own.type if automatic and own is not None else choice)
    allowed = strategy.traits.accelerators
    fallback = automatic and "cpu" in allowed and chosen.name() not in allowed
    return select_accelerator("cpu") if fallback else chosen


def choose_nodes(request: Request, environment: ClusterEnvironment, strategy: Strategy | None) -> int:
    """The number of machines; devices="auto" follows who started the processes in this too, and so do as many
    devices as were started per machine, and a strategy whose processes are machines.
    """
    nodes = request.num_nodes
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ConfigurationError(f"num_nodes={nodes!r} must be a whole number of machines, 1 or more.")
    if not (environment.creates_processes_externally and _needs_launch(strategy)):
        return nodes
    # `devices=` says how many per machine: where that is what was started, num_nodes=1 is but the default.
    alike = str(request.devices) == str(environment.local_world_size()) and nodes == 1
    follows = _is_auto(request.devices) or _is_machine_each(strategy) or alike
    return max(nodes, environment.num_nodes() or 1) if follows else nodes


def choose_devices(
    request: Request, accelerator: Accelerator, environment: ClusterEnvironment, strategy: Strategy | None
) -> list[torch.device]:
    """The devices of this machine's processes: the strategy's own, or what `devices=` means here."""
    if environment.elsewhere:
        return [first_device(accelerator)] * count_elsewhere(request.devices, environment)
    wanted, own = request.devices, _own_devices(strategy)
    if own and not _is_auto(wanted):
        _check_same_devices(own, request, accelerator, strategy)
    if own:
        return own
    if _is_auto(wanted) and not _needs_launch(strategy):
        wanted = "auto" if strategy is not None and strategy.traits.data_parallel else 1
    elif _is_auto(wanted) and environment.creates_processes_externally and not _is_machine_each(strategy):
        wanted = environment.local_world_size() or "auto"
    return select_devices(accelerator, wanted)


def count_elsewhere(devices: Any, environment: ClusterEnvironment) -> int:
    """As many devices as were asked for, of machines that this process does not see."""
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ConfigurationError(
            f"devices={devices!r} under {type(environment).__name__}, whose ranks run elsewhere: write how "
            "many there are to be, for example devices=2."
        )
    return devices


def count_processes(devices: list[torch.device], strategy: Strategy | None) -> int:
    """How many processes this machine runs: one for each device, unless one holds them all."""
    return 1 if not _needs_launch(strategy) or _is_machine_each(strategy) else len(devices)


def check_started(
    environment: ClusterEnvironment, strategy: Strategy | None, processes: int, num_nodes: int
) -> None:
    """Raise if the processes that exist are not those that were asked for."""
    if not _needs_launch(strategy):
        return
    started = environment.creates_processes_externally and _is_machine_each(strategy)
    here = (environment.local_world_size() or 1) if started else 1
    if here > 1:
        raise ConfigurationError(
            f"{type(strategy).__name__} runs one process per machine, which holds all of its devices, but "
            f"{here} were started on this machine. Start one (torchrun --nnodes N --nproc-per-node 1, or the "
            f"script itself on each machine with MASTER_ADDR, MASTER_PORT and NODE_RANK set), or write "
            f'strategy="ddp" for a process per device.'
        )
    environment.validate_settings(num_devices=processes, num_nodes=num_nodes)


def auto_strategy(world_size: int, environment: ClusterEnvironment, machine: Machine) -> Strategy:
    """One device for one process, else DDP as it can start here."""
    started = environment.creates_processes_externally
    forked = machine.interactive and not started and not environment.elsewhere
    several = "ddp_notebook" if forked else "ddp"
    alone = world_size == 1 and not environment.elsewhere
    strategy: Strategy = STRATEGY_REGISTRY.get("single_device" if alone else several)
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
    precision = precision.for_device(device_type)
    _check_precision(precision, strategy)
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


def check_accelerator(
    strategy: Strategy, accelerator: Accelerator, device_type: str, request: Request
) -> None:
    """Raise if the strategy does not run on the accelerator, nor on devices of this type."""
    allowed = strategy.traits.accelerators
    if allowed and not {accelerator.name(), device_type}.intersection(allowed):
        raise ConfigurationError(
            f"strategy={_name(request.strategy)} runs on {', '.join(allowed)} only, but "
            f"accelerator={_name(request.accelerator)} is {accelerator.name()} here. Write another strategy "
            '("ddp" runs on every device), or run where there is one.'
        )


def check_size(strategy: Strategy, devices: list[torch.device], num_nodes: int, request: Request) -> None:
    """Raise if one process was asked to hold several devices."""
    traits, asked = strategy.traits, len(devices) * num_nodes
    if not traits.needs_launch and not traits.data_parallel and asked > 1:
        raise ConfigurationError(
            f"strategy={_name(request.strategy)} runs one process on one device, but "
            f"devices={request.devices!r} and num_nodes={num_nodes} ask for {asked}. Write devices=1, or "
            'strategy="ddp".'
        )


def check_interactive(
    strategy: Strategy, environment: ClusterEnvironment, machine: Machine, processes: int, request: Request
) -> None:
    """Raise if processes would have to be started by running a notebook again."""
    reruns_script = getattr(strategy, "start_method", None) == "popen"
    if (
        machine.interactive
        and reruns_script
        and processes > 1
        and not (environment.creates_processes_externally or environment.elsewhere)
    ):
        raise ConfigurationError(
            "This is a notebook or a prompt: there is no script that "
            f"strategy={_name(request.strategy)} could run again for the other ranks. Write "
            f"strategy={_forked(request.strategy)} and fabric.launch(function), or put the code into a "
            "script."
        )


def _forked(choice: Any) -> str:
    """How to write a strategy such that its ranks are forks of this process."""
    if isinstance(choice, Strategy):
        return f'{type(choice).__name__}(..., start_method="fork")'
    if f"{choice}_notebook" in STRATEGY_REGISTRY.names():
        return f'"{choice}_notebook"'
    entry = STRATEGY_REGISTRY.entry(choice)
    settings = {**entry.defaults, "start_method": "fork"}
    return f"{entry.load().__name__}({', '.join([f'{key}={value!r}' for key, value in settings.items()])})"


def _check_precision(precision: Precision, strategy: Strategy) -> None:
    allowed, why = strategy.traits.precisions, strategy.traits.precisions_why
    if precision.replaces_parameters and strategy.layout.splits:
        raise ConfigurationError(
            f"{type(strategy).__name__} splits parameters over ranks, which those that "
            f'{type(precision).__name__} makes cannot be. Write strategy="ddp" or "zero1".'
        )
    if allowed and precision.precision not in allowed:
        raise ConfigurationError(
            f"{type(strategy).__name__} does not run with precision={precision.precision!r}"
            f"{': ' * bool(why)}{why}. Write one of {', '.join(map(repr, allowed))}, or another strategy."
        )


def _own_devices(strategy: Strategy | None) -> list[torch.device]:
    own = _own_device(strategy)
    return list(getattr(strategy, "parallel_devices", None) or ([] if own is None else [own]))


def _own_device(strategy: Strategy | None) -> torch.device | None:
    """The device that a strategy of one process was made with."""
    return None if strategy is None or strategy.traits.needs_launch else strategy.given_device


def _check_same_devices(
    own: list[torch.device], request: Request, accelerator: Accelerator, strategy: Strategy | None
) -> None:
    asked = select_devices(accelerator, request.devices)
    count_only = isinstance(request.devices, int)
    if len(asked) != len(own) or not (count_only or asked == own):
        raise _twice(
            "choice of devices",
            f"devices={request.devices!r}",
            f"{type(strategy).__name__} with {', '.join(map(str, own))}",
        )


def _needs_launch(strategy: Strategy | None) -> bool:
    return strategy is None or strategy.traits.needs_launch


def _is_machine_each(strategy: Strategy | None) -> bool:
    return strategy is not None and strategy.traits.one_process_per_node


def _is_auto(devices: Any) -> bool:
    return isinstance(devices, str) and devices.strip() == "auto"


def _spelled(name: str, value: Any) -> str:
    """One spelling for what means the same: [0, 1] and "0,1", 16 and "16-mixed"."""
    if name == "precision" and value is not None:
        policy = find_policy(value)
        return str(value) if policy is None else policy.name
    if name == "devices" and isinstance(value, list | tuple):
        return ",".join(map(str, value)) + ("," if len(value) == 1 else "")
    return str(value).replace(" ", "").lower()


def _read_nodes(value: str) -> int:
    if not value.strip().isdecimal():
        raise ConfigurationError(f"FABRIC_NUM_NODES={value!r} must be a whole number of machines, 1 or more.")
    return int(value)


def _twice(what: str, first: str, second: str) -> ConfigurationError:
    return ConfigurationError(f"The {what} is given twice: by {first} and by {second}. Keep one of the two.")


def _name(value: Any) -> str:
    return repr(value) if isinstance(value, str) else type(value).__name__
