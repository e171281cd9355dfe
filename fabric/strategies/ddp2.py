"""`DDP2Strategy`: one process per machine, its batch split over its devices; DDP across machines."""

from __future__ import annotations

from typing import Any

from fabric.core.errors import ConfigurationError
from fabric.strategies.ddp import DDPStrategy
from fabric.strategies.layouts.data_parallel import ReplicatedSplitBatch


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

    Arguments are those of `DDPStrategy`.

    Raises:
        ConfigurationError: A `start_method` or `context_parallel`. When `Fabric` is made: several processes
            were started on this machine.
    """

    layout: ReplicatedSplitBatch
    _layout = ReplicatedSplitBatch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in ("start_method", "context_parallel"):
            if name in kwargs:
                raise ConfigurationError(
                    f"DDP2Strategy({name}={kwargs[name]!r}): there is one process on each machine, which "
                    f"splits batches over its devices. Leave {name} out, or write DDPStrategy({name}=...)."
                )
        super().__init__(*args, **kwargs)
