"""`HorovodStrategy`: Horovod's optimizer between our verbs and its ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ConfigurationError, LaunchError
from fabric.core.registry import did_you_mean
from fabric.integrations.horovod.environment import HorovodEnvironment
from fabric.integrations.horovod.layout import Reduced
from fabric.integrations.horovod.package import load_horovod
from fabric.strategies.parallel import ParallelStrategy

if TYPE_CHECKING:
    from datetime import timedelta

    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.strategies.launchers.launcher import Launcher

_COMPRESSIONS = ("none", "fp16")


class HorovodStrategy(ParallelStrategy):
    """Data parallel training by Horovod: `horovodrun -np 2 python train.py`, or `mpirun`.

    Gradients are averaged by its `DistributedOptimizer`, during the backward; parameters, buffers and the
    states of optimizers are rank zero's at setup. The verbs of data (`all_reduce`, `save`, ...) go over a
    process group of torch beside it, so that they are checked as under all strategies.

    Args:
        compression: "none", or "fp16": gradients travel in half precision.
        process_group_backend: As in `DDPStrategy`, for the group beside.
        timeout: As in `DDPStrategy`.
        startup_timeout: As in `DDPStrategy`.
        kwargs: As in `ParallelStrategy`.

    Raises:
        ConfigurationError: Unknown `compression`.
        MissingExtraError: Horovod is not installed.
    """

    layout: Reduced

    def __init__(
        self,
        compression: str = "none",
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        startup_timeout: timedelta = ParallelStrategy.startup_timeout,
        **kwargs: Any,
    ) -> None:
        if compression not in _COMPRESSIONS:
            raise ConfigurationError(
                f"HorovodStrategy(compression={compression!r}): write 'none' or 'fp16'."
                f"{did_you_mean(compression, _COMPRESSIONS)}"
            )
        load_horovod()
        super().__init__(**kwargs)
        if self.cluster_environment is None and "HOROVOD_RANK" in os.environ:
            self.cluster_environment = HorovodEnvironment()
        self._set_processes(process_group_backend, timeout, startup_timeout, "popen")
        self.layout = Reduced(compression)

    def _make_launcher(self, environment: ClusterEnvironment) -> Launcher | None:
        count = self.num_processes * self.num_nodes
        if count > 1 and not environment.creates_processes_externally:
            raise ConfigurationError(
                f'strategy="horovod" with {count} processes, of which nobody has started the others: '
                f"Horovod's own launcher does. Write `horovodrun -np {count} python train.py`, which comes "
                "with Horovod, or mpirun where it was built with MPI."
            )
        return super()._make_launcher(environment)

    def setup_environment(self) -> None:
        """See the base. All ranks call this.

        Raises:
            LaunchError: Horovod counts other ranks than there are.
        """
        super().setup_environment()
        horovod, here = load_horovod(), self.topology
        if (horovod.rank(), horovod.size()) != (here.rank, here.world_size):
            raise LaunchError(
                f"This is rank {here.rank} of {here.world_size}, but Horovod says {horovod.rank()} of "
                f"{horovod.size()}: something else started the processes. Start them with `horovodrun -np "
                f"{here.world_size} python train.py`, or with mpirun where Horovod was built with MPI."
            )

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step the optimizer, with gradients that have arrived. All ranks must call this.

        A closure runs before the step, whose gradients those are then.
        """
        closure = kwargs.pop("closure", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.layout.synchronize([p for group in optimizer.param_groups for p in group["params"]])
        with optimizer.skip_synchronize():
            result = super().optimizer_step(optimizer, **kwargs)
        return result if closure is None else loss

    def join(self) -> int:
        """After the last batch of this rank: take part, with zeros, in the steps of those that have more.

        All ranks must call this; it gives the last rank that did. Until then no rank may call another verb.
        """
        last: int = load_horovod().join()
        return last
