"""Resolve the arguments of `Fabric` (`Request`) on this machine (`Machine`) to a `Plan`. Each rule is one
function.
"""

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
from fabric.plugins.environments.detect import find_environment, warn_of_foreign_ranks
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
    """Unresolved arguments of `Fabric`."""

    accelerator: Any = "auto"
    strategy: Any = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    precision: Any = None
    plugins: Any = None


@dataclass(frozen=True)
class Machine:
    """Facts about this machine and process, independent of the arguments."""

    environment: ClusterEnvironment
    """The detected launcher of this process."""
    flags: dict[str, str] = field(default_factory=dict)
    """Arguments of `fabric run`, by name."""
    interactive: bool = False
    """Whether this is a notebook or a prompt, so that no script can be run again."""
    reason: str = ""
    """The reason for the choice of this environment."""
    forced: str | None = None
    """FABRIC_ENVIRONMENT, if it chose the environment."""

    @classmethod
    def detect(cls) -> Machine:
        """Return the facts of this machine and process."""
        found = find_environment()  # first: in a child process of a rank it removes the rank's variables
        variables = {name: os.environ.get(f"FABRIC_{name.upper()}") for name in _FLAGS}
        return cls(
            environment=found.environment,
            flags={name: value for name, value in variables.items() if value},
            interactive=hasattr(sys, "ps1"),
            reason=found.reason,
            forced=found.forced,
        )


def resolve(request: Request, machine: Machine) -> Plan:
    """Return the plan, or raise an error that names both of two contradicting settings.

    Raises:
        ConfigurationError: Unknown names, contradictions, or devices that this machine does not have.
        ArgumentTypeError: An argument of the wrong kind.
    """
    request = lower_names(merge_flags(request, machine.flags))
    plugins = sort_plugins(request.plugins)
    requested = requested_strategy(request.strategy)
    environment = choose_environment(plugins[ClusterEnvironment], requested, machine)
    accelerator = choose_accelerator(request.accelerator, requested, environment.remote_ranks)
    nodes = choose_nodes(request, environment, requested.traits)
    devices = choose_devices(request, accelerator, environment, requested)
    check_started_processes(environment, requested, devices, nodes, machine)
    strategy = choose_strategy(requested, len(devices) * nodes, environment, machine)
    check_accelerator(strategy, accelerator, devices[0].type, request)
    check_size(strategy, devices, nodes, request)
    check_interactive(strategy, environment, machine, devices, request)
    precision = choose_precision(request.precision, plugins[Precision], strategy, devices[0].type)
    io = at_most_one("checkpoint IO", _sources(plugins[CheckpointIO], strategy, "checkpoint_io"))[1]
    return Plan(strategy, accelerator, devices, nodes, precision, environment, io, plugins[Part])


def at_most_one(what: str, sources: dict[str, Any]) -> tuple[str, Any]:
    """Return the source and value of the one that is not None; ("", None) if all are None.

    Raises:
        ConfigurationError: Several are not None.
    """
    given = [(name, value) for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ConfigurationError(
            f"The {what} is given twice: by {given[0][0]} and by {given[1][0]}. Keep one of the two."
        )
    return given[0] if given else ("", None)


def merge_flags(request: Request, flags: dict[str, str]) -> Request:
    """Return the request with the arguments of `fabric run`.

    Raises:
        ConfigurationError: An argument of `Fabric` contradicts one of `fabric run`.
    """
    defaults = Request()
    for name, value in flags.items():
        in_code = getattr(request, name)
        if value == "auto" or str(in_code).lower() == value.lower():
            continue
        if in_code != getattr(defaults, name):
            raise ConfigurationError(
                f"Fabric({name}={in_code!r}) contradicts {name}={value!r} from `fabric run` "
                f"or FABRIC_{name.upper()}. Remove {name}= from the code, or leave "
                f"--{name.replace('_', '-')} out, and the variable."
            )
        number = name == "num_nodes" and value.strip().isdecimal()
        request = replace(request, **{name: int(value) if number else value})  # type: ignore[arg-type]
    return request


def lower_names(request: Request) -> Request:
    """Return the request with names in lower case ("DDP" as "ddp"), except registered ones."""
    registries = {"strategy": STRATEGY_REGISTRY, "accelerator": ACCELERATOR_REGISTRY}
    in_code = {name: getattr(request, name) for name in registries}
    lowered: dict[str, Any] = {
        name: value.lower()
        for name, value in in_code.items()
        if isinstance(value, str) and not value.islower() and value not in registries[name]
    }
    return replace(request, **lowered)


def sort_plugins(plugins: Any) -> dict[type, Any]:
    """Return Precision, ClusterEnvironment and CheckpointIO of `plugins=` by base class (or None); and other
    parts in a list.
    """
    found: dict[Any, list[Any]] = {Precision: [], ClusterEnvironment: [], CheckpointIO: [], Part: []}
    listed = [] if plugins is None else plugins if isinstance(plugins, list | tuple) else [plugins]
    for plugin in listed:
        kind = next((kind for kind in found if isinstance(plugin, kind)), None)
        if kind is None:
            text = "plugins= takes Precision, ClusterEnvironment, CheckpointIO and Part objects, but got"
            advice = 'Write Fabric(precision="bf16-mixed") for a name, or an object of such a class.'
            raise ArgumentTypeError(f"{text} {plugin!r}. {advice}")
        if found[kind] and kind is not Part:
            raise ConfigurationError(f"plugins= has two of {kind.__name__}: keep one of them.")
        found[kind].append(plugin)
    return {kind: objects if kind is Part else next(iter(objects), None) for kind, objects in found.items()}


class AutoStrategy(Strategy):
    """Placeholder for strategy="auto", until the number of devices is resolved."""

    traits = Traits(needs_launch=True)


def requested_strategy(choice: Any) -> Strategy:
    """Return `choice`, or a strategy for a name."""
    if isinstance(choice, Strategy):
        return choice
    if not isinstance(choice, str):
        raise ArgumentTypeError(
            f"strategy={choice!r} must be a name or a Strategy object, but is a {type(choice).__name__}. "
            f'Write strategy="ddp", or an object such as DDPStrategy().'
        )
    made = AutoStrategy() if choice == "auto" else STRATEGY_REGISTRY.get(choice)
    if not isinstance(made, Strategy):
        raise ArgumentTypeError(
            f"strategy={choice!r} is registered, but its factory made {made!r}. Register a Strategy "
            "subclass, or a function that returns an object of one."
        )
    return made


def choose_environment(
    plugin: ClusterEnvironment | None, strategy: Strategy, machine: Machine
) -> ClusterEnvironment:
    """Return the environment that was passed, or the detected one; log it with the reason."""
    source, environment = at_most_one(
        "cluster environment", _sources(plugin, strategy, "cluster_environment")
    )
    if environment is None:
        source, environment = machine.reason, machine.environment
    elif machine.forced and not isinstance(environment, type(machine.environment)):
        forced = f"FABRIC_ENVIRONMENT={machine.forced}"
        at_most_one("cluster environment", {source: environment, forced: machine})
    _log.debug("The cluster environment is %s: %s.", type(environment).__name__, source)
    return environment  # type: ignore[no-any-return]


def choose_accelerator(choice: Any, strategy: Strategy, elsewhere: bool) -> Accelerator:
    """Return the accelerator that was passed, or one for the name; "auto" fits the strategy.

    `elsewhere`: whether ranks run on other machines than this process.
    """
    automatic = isinstance(choice, str) and choice == "auto"
    sources = _sources(None, strategy, "accelerator")
    given = at_most_one("accelerator", {f"accelerator={choice!r}": None if automatic else choice, **sources})[
        1
    ]
    if given is not None:
        return select_accelerator(given, not elsewhere)
    devices, allowed = strategy.parallel_devices, strategy.traits.accelerators
    chosen = select_accelerator(devices[0].type if devices else "auto", not elsewhere)
    return select_accelerator("cpu") if "cpu" in allowed and chosen.name() not in allowed else chosen


def choose_nodes(request: Request, environment: ClusterEnvironment, traits: Traits) -> int:
    """Return the number of machines: num_nodes=, or as many as the external launcher has.

    The launcher decides if devices="auto", if `devices=` equals its processes per machine, and for strategies
    with one process per machine.
    """
    nodes = request.num_nodes
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ConfigurationError(
            f"num_nodes={nodes!r} must be a whole number of machines, 1 or more. Write num_nodes=2."
        )
    if not (environment.creates_processes_externally and traits.needs_launch):
        return nodes
    # devices= counts per machine. If it equals the launcher's processes, num_nodes=1 is only the default.
    same_count = str(request.devices) == str(environment.local_world_size()) and nodes == 1
    launcher_decides = _is_auto(request.devices) or traits.one_process_per_node or same_count
    return max(nodes, environment.num_nodes() or 1) if launcher_decides else nodes


def choose_devices(
    request: Request, accelerator: Accelerator, environment: ClusterEnvironment, strategy: Strategy
) -> list[torch.device]:
    """Return the devices of this machine's processes: those of the strategy, or of `devices=`."""
    if environment.remote_ranks:
        return [first_device(accelerator)] * count_remote_devices(request.devices, environment)
    requested, of_strategy = request.devices, strategy.parallel_devices
    if not of_strategy:
        auto = _is_auto(requested)
        return select_devices(accelerator, automatic_devices(environment, strategy) if auto else requested)
    selected = of_strategy if _is_auto(requested) else select_devices(accelerator, requested)
    equal = isinstance(requested, int) or selected == of_strategy
    if len(selected) != len(of_strategy) or not equal:
        both = (
            f"devices={requested!r}",
            f"{type(strategy).__name__} with {', '.join(map(str, of_strategy))}",
        )
        at_most_one("choice of devices", dict.fromkeys(both, requested))
    return of_strategy


def automatic_devices(environment: ClusterEnvironment, strategy: Strategy) -> int | str:
    """Resolve devices="auto": as many as were started on this machine, 1 for one process, else all."""
    if strategy.traits.one_process_per_node:
        return "auto"
    if not strategy.traits.needs_launch:
        return "auto" if strategy.traits.data_parallel else 1
    started = environment.local_world_size() if environment.creates_processes_externally else None
    return started or "auto"


def count_remote_devices(devices: Any, environment: ClusterEnvironment) -> int:
    """Return the number of devices that `devices=` requests on other machines than that of this process.

    Raises:
        ConfigurationError: Not a number of devices.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ConfigurationError(
            f"devices={devices!r} under {type(environment).__name__}: its ranks run on machines that this "
            "process does not see. Write the number of ranks, for example devices=2."
        )
    return devices


def check_started_processes(
    environment: ClusterEnvironment,
    strategy: Strategy,
    devices: list[torch.device],
    nodes: int,
    machine: Machine,
) -> None:
    """Raise if an external launcher started other processes than were requested; warn if it may have."""
    started = environment.local_world_size() if environment.creates_processes_externally else None
    if strategy.traits.one_process_per_node and (started or 1) > 1:
        raise ConfigurationError(
            f"{type(strategy).__name__} runs one process per machine, which uses all of its devices, but "
            f"{started} were started on this machine. Start one (torchrun --nnodes N --nproc-per-node 1), or "
            'write strategy="ddp" for one process per device.'
        )
    if strategy.traits.needs_launch:
        environment.validate_settings(strategy.traits.processes(len(devices)), nodes)
    if environment is machine.environment and not machine.forced:
        warn_of_foreign_ranks(environment, strategy.traits.processes(len(devices)), nodes)


def choose_strategy(
    requested: Strategy, world_size: int, environment: ClusterEnvironment, machine: Machine
) -> Strategy:
    """Return the requested strategy; for "auto" a single device for one process, else a DDP strategy."""
    if not isinstance(requested, AutoStrategy):
        return requested
    started = environment.creates_processes_externally
    forked = machine.interactive and not started and not environment.remote_ranks
    several = "ddp_notebook" if forked else "ddp"
    alone = world_size == 1 and not environment.remote_ranks
    strategy: Strategy = STRATEGY_REGISTRY.get("single_device" if alone else several)
    return strategy


def choose_precision(value: Any, plugin: Precision | None, strategy: Strategy, device_type: str) -> Precision:
    """Return the precision that was passed, or one for the name on this device."""
    sources = {f"precision={value!r}": value, **_sources(plugin, strategy, "precision")}
    source, given = at_most_one("precision", sources)
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
            f"{type(strategy).__name__} shards parameters over ranks, but the parameters of "
            f'{type(precision).__name__} cannot be sharded. Write strategy="ddp" or "zero1".'
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
            '("ddp" runs on every device), or run on a machine that has one.'
        )


def check_size(strategy: Strategy, devices: list[torch.device], num_nodes: int, request: Request) -> None:
    """Raise if a strategy of one process and one device gets several devices."""
    traits, requested = strategy.traits, len(devices) * num_nodes
    if not traits.needs_launch and not traits.data_parallel and requested > 1:
        raise ConfigurationError(
            f"strategy={_name(request.strategy)} runs one process on one device, but "
            f"devices={request.devices!r} and num_nodes={num_nodes} ask for {requested}. Write devices=1, or "
            'strategy="ddp".'
        )


def check_interactive(
    strategy: Strategy,
    environment: ClusterEnvironment,
    machine: Machine,
    devices: list[torch.device],
    request: Request,
) -> None:
    """Raise if the launcher would have to run a script again in a notebook or at a prompt."""
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


def _sources(plugin: Any, strategy: Strategy, name: str) -> dict[str, Any]:
    """Return the values of argument `name` in `plugins=` and in the strategy's constructor, by source."""
    of_strategy = strategy.cluster_environment if name == "cluster_environment" else strategy.arguments[name]
    return {
        f"plugins={type(plugin).__name__}": plugin,
        f"{type(strategy).__name__}({name}=...)": of_strategy,
    }


def _name(value: Any) -> str:
    return repr(value) if isinstance(value, str) else type(value).__name__
