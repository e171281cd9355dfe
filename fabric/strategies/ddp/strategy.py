"""`DDPStrategy`: data parallel training with all parameters on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.strategies.ddp.replicate import Replicate
from fabric.strategies.parallel import ParallelStrategy, check_keywords

if TYPE_CHECKING:
    import torch

    from fabric.accelerators.accelerator import Accelerator
    from fabric.checkpoint.checkpoint_io import CheckpointIO
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.precision.precision import Precision
    from fabric.strategies.context_parallel.part import ContextParallel
    from fabric.strategies.parallel import StartMethod


class DDPStrategy(ParallelStrategy):
    """Data parallel training by torch's DistributedDataParallel, one process per device.

    Args:
        accelerator: As in `Strategy`.
        parallel_devices: As in `ParallelStrategy`.
        cluster_environment: As in `ParallelStrategy`.
        checkpoint_io: As in `Strategy`.
        precision: As in `Strategy`.
        process_group_backend: torch's backend ("gloo", "nccl"); None: the one for the devices.
        timeout: How long a collective waits for the other ranks.
        start_method: "popen" re-runs the script per rank; "spawn", "fork", "forkserver" run a function.
        startup_timeout: How long ranks wait for each other at startup.
        context_parallel: `ContextParallel(...)` shards long sequences over ranks; None: no sharding.
        kwargs: Keyword arguments of DistributedDataParallel (find_unused_parameters, bucket_cap_mb, ...).
            Defaults that differ from torch's: `Replicate._keywords` in `ddp/replicate.py`.
            `process_group=`: Verbs, loaders and checkpoints of this Fabric are among these ranks, and
            `is_global_zero` is true on the first. Other ranks must make none of its calls.
            `static_graph=True` has no effect: torch's static graphs silently leave gradients unsynchronised
            if a backward differs from the first one.

    Raises:
        ConfigurationError: Unknown `start_method` or keyword; `process_group` with `context_parallel`.
        ArgumentTypeError: `process_group` is a list of ranks, or a timeout is not a timedelta.
    """

    _layout: type[Replicate] = Replicate

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
        start_method: StartMethod = "popen",
        *,
        startup_timeout: timedelta = timedelta(minutes=10),
        context_parallel: ContextParallel | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision)
        self._set_processes(process_group_backend, timeout, startup_timeout, start_method, context_parallel)
        of_torch = [*inspect.signature(DistributedDataParallel).parameters][1:]  # without the module
        check_keywords(self, DDPStrategy, kwargs, of_torch)
        self.process_group = kwargs.get("process_group")
        if isinstance(self.process_group, Iterable):
            raise ArgumentTypeError(
                f"process_group={self.process_group!r} is not a process group. Write "
                "process_group=torch.distributed.new_group(ranks)."
            )
        if self.process_group is not None and context_parallel is not None:
            raise ConfigurationError(
                f"{type(self).__name__} got both process_group= and context_parallel=. Sequences are shared "
                "by all ranks of the job. Leave one of them out."
            )
        self.layout = self._layout(kwargs)

    @property
    def _ddp_kwargs(self) -> dict[str, Any]:
        return self.layout.settings  # type: ignore[attr-defined, no-any-return]  # read at setup

    @_ddp_kwargs.setter
    def _ddp_kwargs(self, value: dict[str, Any]) -> None:
        self.layout.settings = value  # type: ignore[attr-defined]
