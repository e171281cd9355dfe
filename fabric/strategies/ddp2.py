"""`DDP2Strategy`: one process per machine, its batch split over its devices; DDP across machines."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError
from fabric.strategies.ddp import DDPStrategy
from fabric.strategies.layouts.data_parallel import ReplicatedSplitBatch

if TYPE_CHECKING:
    import torch

    from fabric.accelerators.accelerator import Accelerator
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.plugins.io.checkpoint_io import CheckpointIO
    from fabric.plugins.precision.precision import Precision
    from fabric.strategies.plan import Plan


class DDP2Strategy(DDPStrategy):
    """`DataParallelStrategy` inside each machine, DDP across machines: the loss sees a machine's whole batch.

    For losses that compare all samples with each other (contrastive losses). One `batch_size` means the batch
    of all devices of one machine: with batch_size=32, devices=4 and num_nodes=2, each replica sees 8 rows,
    each loss 32, and an optimizer step 64. There is one process, and so one rank, for each machine:
    `world_size` is the number of machines, and loaders are sharded by machine. All ranks make the calls that
    all ranks make under DDP: setup, `fabric.backward`, collectives, save and load.

    Gradients are the mean over machines of each machine's own, where `fabric.backward` (or `loss.backward()`)
    leaves them on all ranks. How a batch is split and gathered, which random numbers are drawn: as in
    `DataParallelStrategy`. Buffers are those of replica 0 of machine 0.

    Start one process on each machine: `torchrun --nnodes N --nproc-per-node 1 ...`, or the script itself with
    MASTER_ADDR, MASTER_PORT and NODE_RANK set and `Fabric(num_nodes=N)`.

    Args:
        accelerator: As in `Strategy`.
        parallel_devices: The devices of this machine; None: chosen by `Fabric`, all GPUs for devices="auto".
        cluster_environment: As in `ParallelStrategy`.
        checkpoint_io: As in `Strategy`.
        precision: As in `Strategy`.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        startup_timeout: As in `DDPStrategy`.
        kwargs: Keywords of DistributedDataParallel.

    Raises:
        ConfigurationError: A `start_method`. When `Fabric` is made: several processes were started on this
            machine.
    """

    layout: ReplicatedSplitBatch
    _layout = ReplicatedSplitBatch

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
        *,
        startup_timeout: timedelta = timedelta(minutes=10),
        **kwargs: Any,
    ) -> None:
        if "start_method" in kwargs:
            raise ConfigurationError(
                f"DDP2Strategy(start_method={kwargs['start_method']!r}): there is one process on each "
                f"machine, and so nothing to start. Leave start_method out."
            )
        if "context_parallel" in kwargs:
            raise ConfigurationError(
                "DDP2Strategy(context_parallel=...): one process splits batches over the devices of its "
                "machine, and sequences are divided over processes. Use DDPStrategy(context_parallel=...)."
            )
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision,
            process_group_backend,
            timeout,
            startup_timeout=startup_timeout,
            **kwargs,
        )

    def bind(self, plan: Plan) -> None:
        """Complete the composition; called once, by `Fabric`."""
        self.layout.devices = plan.devices
        super().bind(plan)
