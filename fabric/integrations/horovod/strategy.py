"""`HorovodStrategy`: DDP with gradients averaged by Horovod."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError, LaunchError
from fabric.core.registry import did_you_mean
from fabric.integrations.horovod.environment import HorovodEnvironment
from fabric.integrations.horovod.layout import HorovodLayout
from fabric.integrations.horovod.package import load_horovod, translated_errors
from fabric.strategies.ddp.strategy import DDPStrategy

if TYPE_CHECKING:
    from fabric.launch.launcher import Launcher
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment

_COMPRESSIONS = ("none", "fp16")


class HorovodStrategy(DDPStrategy):
    """DDP with gradients averaged by Horovod: `horovodrun -np 2 python train.py`, or `mpirun`.

    torch's DDP puts gradients in buckets, and Horovod averages these during the backward. At setup all ranks
    get rank zero's parameters, buffers and optimizer states. All verbs (`all_reduce`, `save`, ...) use a
    process group of torch, so that they are checked as under all strategies.

    Args:
        compression: "none", or "fp16": gradients are sent in half precision.
        kwargs: As in `DDPStrategy`.

    Raises:
        ConfigurationError: Unknown `compression`.
        MissingExtraError: Horovod is not installed.
    """

    layout: HorovodLayout

    def __init__(self, compression: str = "none", **kwargs: Any) -> None:
        if compression not in _COMPRESSIONS:
            raise ConfigurationError(
                f"HorovodStrategy(compression={compression!r}): write 'none' or 'fp16'."
                f"{did_you_mean(compression, _COMPRESSIONS)}"
            )
        load_horovod()
        super().__init__(**kwargs)
        if self.cluster_environment is None and "HOROVOD_RANK" in os.environ:
            self.cluster_environment = HorovodEnvironment()
        self.layout = HorovodLayout(self.layout.settings, compression)

    def _make_launcher(self, environment: ClusterEnvironment) -> Launcher | None:
        count = self.num_processes * self.num_nodes
        if count > 1 and not environment.creates_processes_externally:
            raise ConfigurationError(
                f'strategy="horovod" with {count} processes, but only this one was started: Horovod needs '
                f"its own launcher. Run `horovodrun -np {count} python train.py`, or mpirun with a build "
                "for MPI."
            )
        return super()._make_launcher(environment)

    def setup_environment(self) -> None:
        """Set up device and process group, and check Horovod's ranks. All ranks must call this.

        Raises:
            LaunchError: Horovod's rank or size differs from the job's.
        """
        super().setup_environment()
        horovod, topology = load_horovod(), self.topology
        if (horovod.rank(), horovod.size()) != (topology.rank, topology.world_size):
            raise LaunchError(
                f"This is rank {topology.rank} of {topology.world_size}, but Horovod says {horovod.rank()} "
                f"of {horovod.size()}: something else started the processes. Start them with `horovodrun -np "
                f"{topology.world_size} python train.py`, or with mpirun where Horovod was built with MPI."
            )

    def join(self) -> int:
        """Add zeros to the reductions of ranks that have more batches; call it after the last batch.

        All ranks must call this; it returns the last rank that did. Until then no rank may call another verb.

        Raises:
            UsageError: The model has buffers that ranks synchronise, or this rank had no batch.
            RankError: Another rank exited without this call.
        """
        self.layout.check_join()
        horovod = load_horovod()
        with translated_errors("waited in join()"):
            last: int = horovod.join()
        return last
