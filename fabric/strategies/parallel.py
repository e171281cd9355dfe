"""`ParallelStrategy`: the base of strategies of several ranks. Sets the rank and the process group."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist

from fabric.accelerators.select import group_backend
from fabric.collectives.channel import Channel, transport_of
from fabric.collectives.torch_collective import TorchCollective
from fabric.core.cores import share_cores
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.parts import Part
from fabric.core.registry import did_you_mean
from fabric.core.slices import PARTS, find_slice, use_slice
from fabric.core.topology import Topology
from fabric.core.torch_versions import collectives_recorded
from fabric.launch.parent_death import mark_rank
from fabric.launch.rank_prefix import prefix_output
from fabric.launch.system import allow_open_files, private_sockets
from fabric.plugins.environments.local import LocalEnvironment
from fabric.plugins.environments.rendezvous import rendezvous
from fabric.strategies.strategy import Plan, Strategy
from fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.optim import Optimizer

    from fabric.accelerators.accelerator import Accelerator
    from fabric.checkpoint.checkpoint_io import CheckpointIO
    from fabric.collectives.collective import Collective
    from fabric.launch.launcher import Launcher
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.precision.precision import Precision
    from fabric.strategies.context_parallel.part import ContextParallel

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
START_METHODS = get_args(StartMethod)
EAGER_RANKS = 32
"""Up to this number of ranks gloo connects all of them at the start; beyond, ranks that exchange data."""


class Processes(TypedDict, total=False):
    """Keyword arguments that all strategies of several ranks have."""

    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision: Precision | None
    start_method: StartMethod
    startup_timeout: timedelta


def check_keywords(
    strategy: ParallelStrategy,
    kind: type[ParallelStrategy],
    further: Mapping[str, Any],
    names: Iterable[str] = (*Processes.__annotations__,),
) -> None:
    """Raise for a keyword of `further` that the constructor of `kind` does not have.

    Args:
        strategy: The object, whose class may be derived from `kind`.
        kind: The class whose constructor got `further` as `**kwargs`.
        further: The keywords that are no parameters of the constructor.
        names: Those that `**kwargs` takes.

    Raises:
        ConfigurationError: There is one.
    """
    own = [one.name for one in signature(kind).parameters.values() if one.kind is not one.VAR_KEYWORD]
    known = dict.fromkeys([*own, *names])
    for name in further:
        if name not in known:
            hint = did_you_mean(name, known) or f" It takes {', '.join(known)}."
            raise ConfigurationError(f"{type(strategy).__name__} has no keyword {name!r}.{hint}")


class ParallelStrategy(Strategy):
    """Several ranks; each is a process with one device, or with all devices of its machine.

    Args:
        accelerator: As in `Strategy`.
        parallel_devices: The devices of this machine; None: chosen by `Fabric`.
        cluster_environment: Source of this process's rank and world size; None: detected.
        checkpoint_io: As in `Strategy`.
        precision: As in `Strategy`.
        process_group_backend: torch's backend ("gloo", "nccl"); None: the one for the devices.
        timeout: How long a collective waits for the other ranks.
        start_method: "popen" re-runs the script per rank; "spawn", "fork", "forkserver" run a function.
        startup_timeout: How long ranks wait for each other at startup.

    Raises:
        ConfigurationError: Unknown `start_method`.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: StartMethod = "popen",
        startup_timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision)
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self.num_nodes = 1
        self._launcher: Launcher | None = None
        self.made_group = False
        self._set_processes(process_group_backend, timeout, startup_timeout, start_method)

    def _set_processes(
        self,
        backend: str | None,
        timeout: timedelta | None,
        startup_timeout: timedelta,
        start_method: str,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        """Set the arguments of launching, of the process group and of context parallelism.

        Also called by subclasses whose arguments have another order.

        Raises:
            ConfigurationError: Unknown `start_method`.
            ArgumentTypeError: `context_parallel` is no `ContextParallel`, or a timeout is not a timedelta.
        """
        if start_method not in START_METHODS:
            raise ConfigurationError(
                f"start_method={start_method!r} is unknown. Write one of "
                f"{', '.join(map(repr, START_METHODS))}."
            )
        for name, value in {"timeout": timeout, "startup_timeout": startup_timeout}.items():
            if not isinstance(value, timedelta) and (value is not None or name == "startup_timeout"):
                raise ArgumentTypeError(
                    f"{name}={value!r} is not a timedelta. Write {name}=datetime.timedelta(seconds=60)."
                )
        if not isinstance(context_parallel, Part | None):
            raise ArgumentTypeError(
                f"context_parallel={context_parallel!r} is not a ContextParallel. Write "
                "context_parallel=ContextParallel(2) for two ranks that share a sequence."
            )
        self._backend = backend
        self.process_group_timeout = timeout or timedelta(seconds=1800)
        self.startup_timeout = startup_timeout
        self.start_method = start_method
        self.context_parallel = context_parallel
        self.argument_parts = [] if context_parallel is None else [context_parallel]

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return self.traits.processes(len(self.parallel_devices or []))

    @property
    def process_group_backend(self) -> str:
        """torch's backend: the argument, FABRIC_PROCESS_GROUP_BACKEND, or the one for the device (with gloo
        for host tensors).
        """
        chosen = self._backend or os.environ.get("FABRIC_PROCESS_GROUP_BACKEND")
        if chosen or self._accelerator is None:
            return chosen or "gloo"
        return group_backend(self._accelerator, self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """`num_replicas` and `rank` by which loaders are sharded."""
        rank, count = self.data_rank
        return {"num_replicas": count, "rank": rank}

    @property
    def data_group(self) -> Any | None:
        """The process group of ranks that read different data; None: all ranks."""
        return self.data_placement[1] if self.data_placement else None

    @property
    def model_parallel_size(self) -> int:
        """The number of consecutive ranks that read the same data (stages of a pipeline, for example)."""
        return 1 if self.data_group is None else self.topology.world_size // self.data_rank[1]

    @property
    def launcher(self) -> Launcher | None:
        """The launcher of the other processes; None if they were started externally."""
        return self._launcher

    def bind(self, plan: Plan) -> None:
        """Complete the composition by `plan`, the resolved arguments; called once, by `Fabric`.

        Raises:
            ConfigurationError: A size does not fit the number of ranks.
        """
        super().bind(plan)
        self.num_nodes = plan.num_nodes
        self._launcher = self._make_launcher(plan.environment)
        self._init_topology()
        mark_rank()  # here, since the loop may start processes before `launch`

    def setup_environment(self) -> None:
        """Set this rank's topology, device and threads, and join the process group. All ranks must
        call this.
        """
        self._init_topology()
        if self.topology.world_size > 1:
            prefix_output(self.topology.rank)
        with private_sockets():
            super().setup_environment()

    def _join_ranks(self) -> None:
        share_cores(self.topology.local_world_size)
        if not dist.is_initialized():
            self._join_group()
        group = self.process_group
        self.collective = TorchCollective(group=group)
        is_member = self.collective.world_size > 0  # on other ranks the first collective raises
        self.transport = transport_of(self.root_device, dist.get_backend_config(group if is_member else None))
        if group is not None and is_member:
            rank_zero_only.warning_rank = dist.get_process_group_ranks(group)[0]
            members, job = self.collective, (self.topology.rank, self.topology.world_size)
            self.topology = replace(
                self.topology, rank=members.rank_in_group, world_size=members.world_size, job=job
            )
        if dist.get_world_size() > 1:
            found = [find_slice(name) for name in PARTS]
            self.slice_parts = [slice.make_part(self) for slice in found if slice is not None]
            if not faulthandler.is_enabled() and sys.__stderr__ is not None:
                with suppress(OSError):  # stderr is no file
                    faulthandler.enable(
                        sys.__stderr__
                    )  # prints the line in which a backend aborts the process

    def teardown(self) -> None:
        """Destroy the process group, if this strategy created it."""
        from fabric.collectives.handle import report_unwaited

        report_unwaited()
        super().teardown()
        if self.made_group and dist.is_initialized():
            dist.destroy_process_group()
        self.made_group = False
        atexit.unregister(self.teardown)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()

    def group_collective(self, group: Any | None) -> Collective:
        """Return the collective of `group`, a user's process group; None: all ranks of the strategy."""
        default = self.process_group or dist.group.WORLD
        return self.collective if group is None or group is default else TorchCollective(group=group)

    def make_channel(self, group: Any | None) -> Channel:
        """Return a new channel of `group`, whose backends may differ from the default group's; None: all
        ranks of the strategy.
        """
        collective = self.group_collective(group)
        if collective is self.collective or collective.world_size < 1:  # no member: the collective raises
            return Channel(collective, self.transport)
        return Channel(collective, transport_of(self.root_device, dist.get_backend_config(group)))

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks call this. All ranks must call this, with the same `name`."""
        super().barrier(name)
        device = self.transport.staging_device
        if device.type != "cpu" or self.collective.guard is None:
            # The call check runs on the host; this waits for the devices, too.
            self.collective.barrier(device_ids=None if device.index is None else [device.index])

    def _init_topology(self) -> None:
        environment, devices = self.cluster_environment, self.parallel_devices
        if environment is None or not devices:
            raise ConfigurationError(
                f"{type(self).__name__} belongs to no Fabric yet. Pass it as Fabric(strategy=...)."
            )
        count = self.num_processes
        environment.set_global_rank(environment.node_rank() * count + environment.local_rank())
        environment.set_world_size(self.num_nodes * count)
        if environment.local_rank() >= count:
            each = " (one for all devices)" if self.traits.one_process_per_node else ""
            raise ConfigurationError(
                f"This process has local rank {environment.local_rank()}, but {type(self).__name__} with "
                f"devices={len(devices)} runs {count} per machine{each}. Start {count} per machine, or "
                "choose devices= and strategy= for as many as there are."
            )
        self.topology = Topology(
            rank=environment.global_rank(),
            local_rank=environment.local_rank(),
            node_rank=environment.node_rank(),
            world_size=environment.world_size(),
            local_world_size=count,
            num_nodes=self.num_nodes,
            device=devices[environment.local_rank()],
        )
        rank_zero_only.rank, rank_zero_only.warning_rank = self.topology.rank, 0

    def step_plan(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the function that `optimizer.step` runs. LBFGS uses the mean of the losses over ranks."""
        plan = super().step_plan(optimizer)
        if self.topology.world_size == 1 or not isinstance(optimizer, torch.optim.LBFGS):
            return plan
        return partial(self._step_by_mean, plan)

    def _step_by_mean(
        self, plan: Any, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        if closure is None:
            raise ArgumentTypeError(
                "LBFGS.step() needs a closure, since it computes the loss several times per step. Write "
                "optimizer.step(closure): the closure calls zero_grad() and fabric.backward(loss), and "
                "returns the loss."
            )

        def mean() -> Any:
            loss = closure()
            is_tensor = torch.is_tensor(loss)
            local = loss.detach().clone() if is_tensor else torch.tensor(loss, dtype=torch.float64)
            return self.all_reduce(local, self.data_group)

        return optimizer.step(mean, **kwargs) if plan is None else plan(optimizer, closure=mean, **kwargs)

    def _join_group(self) -> None:
        # The functions of this module have the default group as default argument. If torch's compiler imports
        # it later, they keep a reference to the group and so the threads of the backend. A thread that needs
        # the GIL during interpreter shutdown makes the process exit by SIGABRT.
        import torch.distributed.nn.functional

        topology, environment = self.topology, self.cluster_environment
        rank, world_size = topology.rank, topology.world_size
        # Two connections per rank, three more on rank zero for its store, and as many again for groups.
        if not allow_open_files(needed := 256 + 8 * world_size):
            rank_zero_warn(
                f"{world_size} ranks may need {needed} open files each, more than the system allows. If a "
                "rank fails with `Too many open files`, raise the hard limit (ulimit -Hn)."
            )
        store = rendezvous(environment, rank, world_size, self.startup_timeout)  # type: ignore[arg-type]
        backend = _with_host(self.process_group_backend, topology.device)
        lazy = world_size > EAGER_RANKS and "gloo" in backend
        if lazy:
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        with collectives_recorded():
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=self.process_group_timeout,
            )
        if lazy:  # connects each rank with log2(world_size) others here, where `private_sockets` hides them
            dist.all_reduce(torch.zeros(1))
            dist.broadcast(torch.zeros(1), 0)
            if backend == "gloo":
                dist.barrier()
        self.made_group = True
        # torch prints a warning for groups that are not destroyed at exit.
        atexit.register(self.teardown)

    def _make_launcher(self, environment: ClusterEnvironment) -> Launcher | None:
        if environment.creates_processes_externally:
            return None
        launcher: Launcher | None = environment.make_launcher(self)
        if launcher is not None:
            return launcher
        if not isinstance(environment, LocalEnvironment):
            raise ConfigurationError(
                f"{type(environment).__name__}.creates_processes_externally is False, but only "
                "LocalEnvironment can start processes. Return True in it, override make_launcher, or do not "
                "pass the environment."
            )
        if self.start_method == "popen":
            from fabric.launch.script import ScriptLauncher

            return ScriptLauncher(environment, self.num_processes, self.num_nodes)
        functions = use_slice("functions")
        multiprocess: Launcher = functions.MultiprocessLauncher(
            environment, self.num_processes, self.start_method, self.num_nodes
        )
        return multiprocess

    def __getstate__(self) -> dict[str, Any]:
        # A process group belongs to its process; a spawned rank joins its own.
        fresh = {"made_group": False, "collective": TorchCollective()}
        return {**super().__getstate__(), **fresh}


def _with_host(backend: str, device: torch.device) -> str:
    """Return the backend, with gloo for host tensors if it supports only device tensors."""
    capable = dist.Backend.backend_capability.get(backend.lower(), ["cpu"])
    return backend if ":" in backend or "cpu" in capable else f"cpu:gloo,{device.type}:{backend}"
