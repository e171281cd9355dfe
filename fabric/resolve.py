"""Request (the user's flags) + Machine (facts) -> Plan. Each rule is a short function and a row of a test."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fabric.accelerators.select import ACCELERATOR_REGISTRY, first_device, select_accelerator, select_devices
from fabric.checkpoint.checkpoint_io import CheckpointIO
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.parts import Part
from fabric.core.traits import Traits
from fabric.plugins.environments.cluster_environment import ClusterEnvironment
from fabric.plugins.environments.detect import find_environment
from fabric.precision.precision import Precision, make_precision
from fabric.strategies.registry import STRATEGY_REGISTRY
from fabric.strategies.strategy import Plan, Strategy

if TYPE_CHECKING:
    import torch

    from fabric.accelerators.accelerator import Accelerator

_log = logging.getLogger(__name__)
_FLAGS = ("accelerator", "strategy", "devices", "num_nodes", "precision")


@dataclass(frozen=True)
class Request:
    """Arguments of `Fabric` as the user wrote them."""

    accelerator: Any = "auto"
    strategy: Any = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Any = None
    plugins: Any = None


@dataclass(frozen=True)
class Machine:
    """Facts about this machine and process, independent of what the user wrote."""

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
        found = find_environment()  # first: a child of a rank forgets the flags of that rank
        given = {name: os.environ.get(f"FABRIC_{name.upper()}") for name in _FLAGS}
        return cls(
            environment=found.environment,
            flags={name: value for name, value in given.items() if value},
            interactive=hasattr(sys, "ps1"),
            reason=found.reason,
            forced=found.forced,
        )


def resolve(request: Request, machine: Machine) -> Plan:
    """Decide everything, or raise one error that names what contradicts what, and both ways out.

    Raises:
        ConfigurationError: Unknown names, contradictions, or what this machine does not have.
        ArgumentTypeError: An argument of the wrong kind.
    """
    request = lower_names(merge_flags(request, machine.flags))
    plugins = sort_plugins(request.plugins)
    named = name_strategy(request.strategy)
    environment = choose_environment(plugins[ClusterEnvironment], named, machine)
    accelerator = choose_accelerator(request.accelerator, named, environment.remote_ranks)
    nodes = choose_nodes(request, environment, named.traits)
    devices = choose_devices(request, accelerator, environment, named)
    check_started(environment, named, devices, nodes)
    strategy = decided(named, len(devices) * nodes, environment, machine)
    check_accelerator(strategy, accelerator, devices[0].type, request)
    check_size(strategy, devices, nodes, request)
    check_interactive(strategy, environment, machine, devices, request)
    precision = choose_precision(request.precision, plugins[Precision], strategy, devices[0].type)
    io = only("checkpoint IO", _places(plugins[CheckpointIO], strategy, "checkpoint_io"))[1]
    return Plan(strategy, accelerator, devices, nodes, precision, environment, io, plugins[Part])


def only(what: str, sources: dict[str, Any]) -> tuple[str, Any]:
    """Return the source and the value of the one that is not None; ("", None) if all are None."""
    given = [(name, value) for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ConfigurationError(
            f"The {what} is given twice: by {given[0][0]} and by {given[1][0]}. Keep one of the two."
        )
    return given[0] if given else ("", None)


def merge_flags(request: Request, flags: dict[str, str]) -> Request:
    """The request with what `fabric run` was given; an argument in code that says otherwise is an error."""
    defaults = Request()
    for name, value in flags.items():
        written = getattr(request, name)
        if value == "auto" or str(written).lower() == value.lower():
            continue
        if written != getattr(defaults, name):
            raise ConfigurationError(
                f"Fabric({name}={written!r}) contradicts {name}={value!r} from `fabric run` "
                f"(FABRIC_{name.upper()}). Remove {name}= from the code, or leave --{name.replace('_', '-')} "
                "out."
            )
        number = name == "num_nodes" and value.strip().isdecimal()
        request = replace(request, **{name: int(value) if number else value})  # type: ignore[arg-type]
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


def sort_plugins(plugins: Any) -> dict[type, Any]:
    """Precision, environment and checkpoint IO from `plugins=`, each at most once, by their base; and other
    parts, in a list.
    """
    found: dict[Any, list[Any]] = {Precision: [], ClusterEnvironment: [], CheckpointIO: [], Part: []}
    listed = [] if plugins is None else plugins if isinstance(plugins, list | tuple) else [plugins]
    for plugin in listed:
        kind = next((kind for kind in found if isinstance(plugin, kind)), None)
        if kind is None:
            text = "plugins= takes Precision, ClusterEnvironment, CheckpointIO and Part objects, but got"
            raise ArgumentTypeError(f"{text} {plugin!r}.")
        if found[kind] and kind is not Part:
            raise ConfigurationError(f"plugins= has two of {kind.__name__}: keep one of them.")
        found[kind].append(plugin)
    return {kind: given if kind is Part else next(iter(given), None) for kind, given in found.items()}


class Undecided(Strategy):
    """strategy="auto", until it is known how many devices there are."""

    traits = Traits(needs_launch=True)


def name_strategy(choice: Any) -> Strategy:
    """The strategy that was passed or that the name means."""
    if isinstance(choice, Strategy):
        return choice
    if not isinstance(choice, str):
        raise ArgumentTypeError(
            f"strategy={choice!r} must be a name or a Strategy object, but is a {type(choice).__name__}. "
            f'Write strategy="ddp", or an object such as DDPStrategy().'
        )
    made = Undecided() if choice == "auto" else STRATEGY_REGISTRY.get(choice)
    if not isinstance(made, Strategy):
        raise ArgumentTypeError(
            f"strategy={choice!r} is registered, but its factory made {made!r}. Register a Strategy "
            "subclass, or a function that returns an object of one."
        )
    return made


def choose_environment(
    plugin: ClusterEnvironment | None, strategy: Strategy, machine: Machine
) -> ClusterEnvironment:
    """The environment that was passed, once, or the detected one; logs which and why."""
    source, given = only("cluster environment", _places(plugin, strategy, "cluster_environment"))
    if given is None:
        source, given = machine.reason, machine.environment
    elif machine.forced and not isinstance(given, type(machine.environment)):
        only("cluster environment", {source: given, f"FABRIC_ENVIRONMENT={machine.forced}": machine})
    _log.debug("The cluster environment is %s: %s.", type(given).__name__, source)
    return given  # type: ignore[no-any-return]


def choose_accelerator(choice: Any, strategy: Strategy, elsewhere: bool) -> Accelerator:
    """The accelerator that was passed, once, or that the name means here; "auto" heeds the strategy."""
    automatic = isinstance(choice, str) and choice == "auto"
    places = _places(None, strategy, "accelerator")
    given = only("accelerator", {f"accelerator={choice!r}": None if automatic else choice, **places})[1]
    if given is not None:
        return select_accelerator(given, not elsewhere)
    own, allowed = strategy.parallel_devices, strategy.traits.accelerators
    chosen = select_accelerator(own[0].type if own else "auto", not elsewhere)
    return select_accelerator("cpu") if "cpu" in allowed and chosen.name() not in allowed else chosen


def choose_nodes(request: Request, environment: ClusterEnvironment, traits: Traits) -> int:
    """The number of machines; devices="auto" follows who started the processes in this too, and so do as many
    devices as were started per machine, and a strategy whose processes are machines.
    """
    nodes = request.num_nodes
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ConfigurationError(f"num_nodes={nodes!r} must be a whole number of machines, 1 or more.")
    if not (environment.creates_processes_externally and traits.needs_launch):
        return nodes
    # `devices=` says how many per machine: where that is what was started, num_nodes=1 is but the default.
    alike = str(request.devices) == str(environment.local_world_size()) and nodes == 1
    follows = _is_auto(request.devices) or traits.one_process_per_node or alike
    return max(nodes, environment.num_nodes() or 1) if follows else nodes


def choose_devices(
    request: Request, accelerator: Accelerator, environment: ClusterEnvironment, strategy: Strategy
) -> list[torch.device]:
    """The devices of this machine's processes: the strategy's own, or what `devices=` means here."""
    if environment.remote_ranks:
        return [first_device(accelerator)] * count_elsewhere(request.devices, environment)
    wanted, own = request.devices, strategy.parallel_devices
    if not own:
        auto = _is_auto(wanted)
        return select_devices(accelerator, automatic_devices(environment, strategy) if auto else wanted)
    asked = own if _is_auto(wanted) else select_devices(accelerator, wanted)
    if len(asked) != len(own) or not (isinstance(wanted, int) or asked == own):
        both = (f"devices={wanted!r}", f"{type(strategy).__name__} with {', '.join(map(str, own))}")
        only("choice of devices", dict.fromkeys(both, wanted))
    return own


def automatic_devices(environment: ClusterEnvironment, strategy: Strategy) -> int | str:
    """Resolve devices="auto": as many as were started here, one for a single process, else all."""
    if strategy.traits.one_process_per_node:
        return "auto"
    if not strategy.traits.needs_launch:
        return "auto" if strategy.traits.data_parallel else 1
    started = environment.local_world_size() if environment.creates_processes_externally else None
    return started or "auto"


def count_elsewhere(devices: Any, environment: ClusterEnvironment) -> int:
    """Return the number of devices asked for, on machines that this process does not see."""
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ConfigurationError(
            f"devices={devices!r} under {type(environment).__name__}, whose ranks run elsewhere: write how "
            "many there are to be, for example devices=2."
        )
    return devices


def check_started(
    environment: ClusterEnvironment, strategy: Strategy, devices: list[torch.device], nodes: int
) -> None:
    """Raise if the processes that exist are not those that were asked for."""
    started = environment.local_world_size() if environment.creates_processes_externally else None
    if strategy.traits.one_process_per_node and (started or 1) > 1:
        raise ConfigurationError(
            f"{type(strategy).__name__} runs one process per machine, which holds all of its devices, but "
            f"{started} were started on this machine. Start one (torchrun --nnodes N --nproc-per-node 1), or "
            'write strategy="ddp" for a process per device.'
        )
    if strategy.traits.needs_launch:
        environment.validate_settings(strategy.traits.processes(len(devices)), nodes)


def decided(named: Strategy, world_size: int, environment: ClusterEnvironment, machine: Machine) -> Strategy:
    """Return the named strategy; for "auto" one device for one process, else DDP as it can start here."""
    if not isinstance(named, Undecided):
        return named
    started = environment.creates_processes_externally
    forked = machine.interactive and not started and not environment.remote_ranks
    several = "ddp_notebook" if forked else "ddp"
    alone = world_size == 1 and not environment.remote_ranks
    strategy: Strategy = STRATEGY_REGISTRY.get("single_device" if alone else several)
    return strategy


def choose_precision(value: Any, plugin: Precision | None, strategy: Strategy, device_type: str) -> Precision:
    """The precision that was passed, once, or the one that the name means on this device."""
    places = {f"precision={value!r}": value, **_places(plugin, strategy, "precision")}
    source, given = only("precision", places)
    precision = (
        given if isinstance(given, Precision) else make_precision(given if source else 32, device_type)
    )
    precision = precision.for_device(device_type)
    _check_precision(precision, strategy)
    return precision


def _check_precision(precision: Precision, strategy: Strategy) -> None:
    allowed, why = strategy.traits.precisions, strategy.traits.precisions_why
    if precision.replaces_parameters and strategy.traits.splits_parameters:
        raise ConfigurationError(
            f"{type(strategy).__name__} splits parameters over ranks, which those that "
            f'{type(precision).__name__} makes cannot be. Write strategy="ddp" or "zero1".'
        )
    if allowed and precision.precision not in allowed:
        raise ConfigurationError(
            f"{type(strategy).__name__} does not run with precision={precision.precision!r}"
            f"{': ' * bool(why)}{why}. Write one of {', '.join(map(repr, allowed))}, or another strategy."
        )


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
    strategy: Strategy,
    environment: ClusterEnvironment,
    machine: Machine,
    devices: list[torch.device],
    request: Request,
) -> None:
    """Raise if processes would have to be started by running a notebook again."""
    started = environment.creates_processes_externally or environment.remote_ranks
    started = started or strategy.traits.processes(len(devices)) == 1
    if machine.interactive and getattr(strategy, "start_method", None) == "popen" and not started:
        raise ConfigurationError(
            "This is a notebook or a prompt: there is no script that "
            f"strategy={_name(request.strategy)} could run again for the other ranks. Write "
            f'strategy="ddp_notebook", or {type(strategy).__name__}(..., start_method="fork"), and '
            "fabric.launch(function); or put the code into a script."
        )


def _is_auto(devices: Any) -> bool:
    return isinstance(devices, str) and devices.strip() == "auto"


def _places(plugin: Any, strategy: Strategy, name: str) -> dict[str, Any]:
    """Return the places where a part may be given besides its own argument, with the values given there."""
    of_strategy = strategy.cluster_environment if name == "cluster_environment" else strategy.arguments[name]
    return {
        f"plugins={type(plugin).__name__}": plugin,
        f"{type(strategy).__name__}({name}=...)": of_strategy,
    }


def _name(value: Any) -> str:
    return repr(value) if isinstance(value, str) else type(value).__name__
