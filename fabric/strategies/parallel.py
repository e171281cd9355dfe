"""`ParallelStrategy`: several ranks. Places this process among them and holds their process group."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist

from fabric.accelerators.select import group_backend
from fabric.collectives.channel import Channel, transport_of
from fabric.collectives.torch_collective import TorchCollective
from fabric.core.cores import share_cores
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.parts import Part
from fabric.core.slices import PARTS, find_slice, use_slice
from fabric.core.topology import Topology
from fabric.core.torch_versions import collectives_recorded
from fabric.launch.parent_death import mark_rank
from fabric.launch.system import allow_open_files, private_sockets
from fabric.plugins.environments.local import LocalEnvironment
from fabric.plugins.environments.rendezvous import rendezvous
from fabric.strategies.strategy import Plan, Strategy
from fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Processes(TypedDict, total=False):
    """Keywords that all strategies of several ranks share."""

    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision: Precision | None
    start_method: StartMethod
    startup_timeout: timedelta


class ParallelStrategy(Strategy):
    """Several ranks, each a process with one device, or with all devices of its machine.

    Args:
        accelerator: As in `Strategy`.
        parallel_devices: The devices of this machine's ranks; None: chosen by `Fabric`.
        cluster_environment: Who this process is; None: detected.
        checkpoint_io: As in `Strategy`.
        precision: As in `Strategy`.
        process_group_backend: torch's backend ("gloo", "nccl"); None: what fits the devices.
        timeout: How long a collective waits for the other ranks.
        start_method: "popen" re-runs the script per rank; "spawn", "fork", "forkserver" run a function.
        startup_timeout: How long ranks wait for each other at the start.

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
        """Set how ranks are launched, connect, and divide sequences.

        Subclasses whose arguments are in another order call it, too.

        Raises:
            ConfigurationError: Unknown `start_method`.
            ArgumentTypeError: `context_parallel` is no `ContextParallel`.
        """
        if start_method not in START_METHODS:
            raise ConfigurationError(
                f"start_method={start_method!r} is not one of {', '.join(map(repr, START_METHODS))}."
            )
        if not isinstance(context_parallel, Part | None):
            raise ArgumentTypeError(
                f"context_parallel={context_parallel!r} must be a ContextParallel. Write "
                "ContextParallel(2) for two ranks that share a sequence."
            )
        self._backend = backend
        self.process_group_timeout = timeout or timedelta(seconds=1800)
        self.startup_timeout = startup_timeout
        self.start_method = start_method
        self.context_parallel = context_parallel
        self.given_parts = [] if context_parallel is None else [context_parallel]

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return self.traits.processes(len(self.parallel_devices or []))

    @property
    def process_group_backend(self) -> str:
        """torch's backend: the one given, FABRIC_PROCESS_GROUP_BACKEND, or what fits the device (gloo
        beside nccl).
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
        """The ranks that see different data; None: all of them."""
        return self.shared_data[1] if self.shared_data else None

    @property
    def model_parallel_size(self) -> int:
        """The number of consecutive ranks that see the same data: of a pipeline, or of a shared sequence."""
        return 1 if self.data_group is None else self.topology.world_size // self.data_rank[1]

    @property
    def launcher(self) -> Launcher | None:
        """The launcher of the other processes; None if something else started them."""
        return self._launcher

    def bind(self, plan: Plan) -> None:
        """Complete the composition; called once, by `Fabric`.

        Raises:
            ConfigurationError: Sizes that do not fit the number of ranks.
        """
        super().bind(plan)
        self.num_nodes = plan.num_nodes
        self._launcher = self._make_launcher(plan.environment)
        self._init_topology()
        mark_rank()  # before `launch`, too, the loop may start processes

    def setup_environment(self) -> None:
        """Find this rank's place, set its device and threads, and join the process group. All ranks must call
        this.
        """
        self._init_topology()
        super().setup_environment()

    def _join_ranks(self) -> None:
        share_cores(self.topology.local_world_size)
        if not dist.is_initialized():
            self._join_group()
        group = self.process_group
        self.collective = TorchCollective(group=group)
        inside = self.collective.world_size > 0  # else its first call of all ranks is refused
        self.transport = transport_of(self.root_device, dist.get_backend_config(group if inside else None))
        if group is not None and inside:
            own, job = self.collective, (self.topology.rank, self.topology.world_size)
            self.topology = replace(self.topology, rank=own.rank_in_group, world_size=own.world_size, job=job)
        if dist.get_world_size() > 1:
            found = [find_slice(name) for name in PARTS]
            self.joined_parts = [slice.make_part(self) for slice in found if slice is not None]
            if not faulthandler.is_enabled() and sys.__stderr__ is not None:
                with suppress(OSError):  # a stream that is no file
                    faulthandler.enable(sys.__stderr__)  # where a backend ends the process: at which line

    def teardown(self) -> None:
        """Let go of the process group, if this strategy made it."""
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
        """The collective of a user's process group; None: of all ranks of the strategy."""
        own = self.process_group or dist.group.WORLD
        return self.collective if group is None or group is own else TorchCollective(group=group)

    def make_channel(self, group: Any | None) -> Channel:
        """The channel of a group: a user's may have other backends than that of all ranks."""
        collective = self.group_collective(group)
        if collective is self.collective or collective.world_size < 1:  # whose call is refused
            return Channel(collective, self.transport)
        return Channel(collective, transport_of(self.root_device, dist.get_backend_config(group)))

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks are here. All ranks must call this; `name` must be the same on all."""
        super().barrier(name)
        here = self.transport.staging_device
        if here.type != "cpu" or self.collective.guard is None:
            # Frames are exchanged on the host: wait for the work of the device, too.
            self.collective.barrier(device_ids=None if here.index is None else [here.index])

    def _init_topology(self) -> None:
        environment, devices = self.cluster_environment, self.parallel_devices
        if environment is None or not devices:
            raise ConfigurationError(
                f"{type(self).__name__} is not bound yet. Pass it as Fabric(strategy=...)."
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
        rank_zero_only.rank = self.topology.rank

    def step_plan(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the function that `optimizer.step` runs; LBFGS gets the mean of the closures over ranks."""
        plan = super().step_plan(optimizer)
        if self.topology.world_size == 1 or not isinstance(optimizer, torch.optim.LBFGS):
            return plan
        return partial(self._step_by_mean, plan)

    def _step_by_mean(
        self, plan: Any, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        def mean() -> Any:
            loss = closure()
            own = loss.detach().clone() if torch.is_tensor(loss) else torch.tensor(loss, dtype=torch.float64)
            return self.all_reduce(own, self.data_group)

        return optimizer.step(mean, **kwargs) if plan is None else plan(optimizer, closure=mean, **kwargs)

    def _join_group(self) -> None:
        # Its functions take the default group as default argument: imported later (by torch's compiler, from
        # an optimizer) they hold it for ever. A group that outlives its destruction keeps the backend's
        # threads, and one that needs the GIL while the interpreter ends makes the process end by SIGABRT.
        import torch.distributed.nn.functional  # noqa: F401

        here, environment = self.topology, self.cluster_environment
        # Two connections to each other rank, rank zero's three for its store, and as many again for groups.
        if not allow_open_files(needed := 256 + 8 * here.world_size):
            rank_zero_warn(
                f"{here.world_size} ranks may need {needed} open files each, more than the system allows. "
                "If one fails by `Too many open files`, raise the hard limit (ulimit -Hn)."
            )
        store = rendezvous(environment, here.rank, here.world_size, self.startup_timeout)  # type: ignore[arg-type]
        with collectives_recorded(), private_sockets():
            dist.init_process_group(
                _with_host(self.process_group_backend, here.device),
                store=store,
                rank=here.rank,
                world_size=here.world_size,
                timeout=self.process_group_timeout,
            )
        self.made_group = True
        # Groups that stand at exit make torch print a warning.
        atexit.register(self.teardown)

    def _make_launcher(self, environment: ClusterEnvironment) -> Launcher | None:
        if environment.creates_processes_externally:
            return None
        own: Launcher | None = environment.make_launcher(self)
        if own is not None:
            return own
        if not isinstance(environment, LocalEnvironment):
            raise ConfigurationError(
                f"{type(environment).__name__} says that nobody started the processes, and only "
                "LocalEnvironment can be launched from. Let creates_processes_externally be True, or leave "
                "the environment out."
            )
        if self.start_method == "popen":
            from fabric.launch.script import ScriptLauncher

            return ScriptLauncher(environment, self.num_processes, self.num_nodes)
        functions = use_slice("functions")
        made: Launcher = functions.MultiprocessLauncher(
            environment, self.num_processes, self.start_method, self.num_nodes
        )
        return made

    def __getstate__(self) -> dict[str, Any]:
        # A group belongs to its process; a spawned rank joins anew.
        own = {"made_group": False, "collective": TorchCollective()}
        return {**super().__getstate__(), **own}


def _with_host(backend: str, device: torch.device) -> str:
    """The backend with gloo for what is on the host, where it sends from the device alone."""
    capable = dist.Backend.backend_capability.get(backend.lower(), ["cpu"])
    return backend if ":" in backend or "cpu" in capable else f"cpu:gloo,{device.type}:{backend}"
