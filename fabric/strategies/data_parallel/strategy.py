"""`DataParallelStrategy`: one process whose batch is split over its devices. `DDP2Strategy`: DDP
around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError
from fabric.core.topology import Topology
from fabric.strategies.data_parallel.layout import ReplicatedSplitBatch, SplitBatch
from fabric.strategies.ddp.strategy import DDPStrategy
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.strategy import Strategy

if TYPE_CHECKING:
    import torch

    from fabric.accelerators.accelerator import Accelerator
    from fabric.checkpoint.checkpoint_io import CheckpointIO
    from fabric.launch.launcher import Launcher
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.precision.precision import Precision
    from fabric.strategies.strategy import Plan


class DataParallelStrategy(ParallelStrategy):
    """One process that splits each batch over its devices and gathers the outputs (torch's DataParallel).

    `batch_size` is that of all devices together: with batch_size=32 and devices=4, each replica gets 8 rows,
    and the loss 32. `fabric.world_size` is 1, loaders are not sharded, `launch` starts no processes.
    Gradients are those of plain torch on the whole batch, except in layers that compute across rows (batch
    norm): they get the rows of a replica, and keep the statistics of replica 0.

    Tensors in the arguments of `model(...)`, in any nesting, are split along dim 0 as by `torch.chunk`; all
    must have the same number of rows. Other arguments are passed to every replica. Outputs are joined along
    dim 0; a 0-dim output becomes a vector with one entry per replica (average it weighted by rows). Outputs
    must be tensors. Methods other than `forward` are not split.

    On CUDA replicas run in parallel, with the random generators of their devices. torch.compile around the
    model compiles nothing inside the replicas; compile submodules instead. On the CPU `devices=` has no
    effect: the model gets the whole batch, as in torch's DataParallel.

    Args:
        accelerator: As in `Strategy`.
        parallel_devices: The devices of this process; None: chosen by `Fabric`, for devices="auto" all GPUs.
        checkpoint_io: As in `Strategy`.
        precision: As in `Strategy`.

    Raises:
        ConfigurationError: In `Fabric(...)`: several machines, or several processes were started.
    """

    layout: SplitBatch

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, None, checkpoint_io, precision)
        self.start_method = ""  # there is nothing to start
        self.layout = SplitBatch()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """None: this process reads all data."""
        return None

    def bind(self, plan: Plan) -> None:
        """Complete the composition by `plan`, the resolved arguments; called once, by `Fabric`.

        Raises:
            ConfigurationError: Several machines, or several processes were started.
        """
        environment, num_nodes = plan.environment, plan.num_nodes
        started = environment.world_size() if environment.creates_processes_externally else 1
        if num_nodes > 1 or started > 1:
            what = f"num_nodes={num_nodes} needs more" if num_nodes > 1 else f"{started} were started"
            raise ConfigurationError(
                f'strategy="dp" is one process that holds all devices={len(plan.devices)}, but {what}. Start '
                'one process with num_nodes=1, or write strategy="ddp" (a process for each device) or '
                '"ddp2" (one for each machine).'
            )
        super().bind(plan)

    def _init_topology(self) -> None:
        if not self.parallel_devices:
            raise ConfigurationError(
                f"{type(self).__name__} belongs to no Fabric yet. Pass it as Fabric(strategy=...)."
            )
        self.topology = Topology(device=self.parallel_devices[0])

    def _make_launcher(self, environment: ClusterEnvironment) -> Launcher | None:
        return None

    # The implementations for one rank:
    group_collective = Strategy.group_collective
    barrier = Strategy.barrier
    _join_ranks = Strategy._join_ranks
    __getstate__ = Strategy.__getstate__


class DDP2Strategy(DDPStrategy):
    """`DataParallelStrategy` within each machine, DDP across machines: a loss gets a machine's whole batch.

    For losses that compare all samples with each other (contrastive losses). `batch_size` is that of all
    devices of one machine: with batch_size=32, devices=4 and num_nodes=2, each replica gets 8 rows, each loss
    32, and an optimizer step 64. There is one process, and so one rank, per machine: `world_size` is the
    number of machines, and loaders are sharded by machine. The collectives are those of DDP: setup,
    `fabric.backward`, verbs, save and load.

    Gradients are the mean over machines. Batches are split and gathered, and random numbers drawn, as in
    `DataParallelStrategy`. Buffers are those of replica 0 of machine 0.

    Start one process on each machine: `torchrun --nnodes N --nproc-per-node 1 ...`, or the script itself with
    MASTER_ADDR, MASTER_PORT and NODE_RANK set and `Fabric(num_nodes=N)`.

    Arguments are those of `DDPStrategy`.

    Raises:
        ConfigurationError: `start_method` or `context_parallel` was passed. In `Fabric(...)`: several
            processes were started on this machine.
    """

    layout: ReplicatedSplitBatch
    _layout = ReplicatedSplitBatch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in ("start_method", "context_parallel"):
            if name in kwargs:
                raise ConfigurationError(
                    f"DDP2Strategy got {name}={kwargs[name]!r}. It runs one process per machine, which "
                    f"splits batches over its devices. Leave {name} out, or write DDPStrategy({name}=...)."
                )
        super().__init__(*args, **kwargs)
