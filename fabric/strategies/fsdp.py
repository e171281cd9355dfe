"""`FSDPStrategy`: parameters, gradients and optimizer states split over ranks. FSDP2 underneath."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from fabric.strategies.fsdp_keywords import translate
from fabric.strategies.layouts.fully_shard import FullyShard, ShardSettings
from fabric.strategies.parallel import ParallelStrategy

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from fabric.accelerators.accelerator import Accelerator
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.plugins.io.checkpoint_io import CheckpointIO
    from fabric.plugins.precision.precision import Precision
    from fabric.strategies.layouts.context.part import ContextParallel
    from fabric.strategies.parallel import StartMethod


class FSDPStrategy(ParallelStrategy):
    """Sharded data parallel training by torch's `fully_shard` (FSDP2), one process per device.

    `fabric.setup` splits the model in place, group by group: its parameters become DTensors. Optimizers made
    before or after setup, `clip_gradients`, `save` and `load` deal in the whole model, with the user's keys.
    Every forward is a collective: all ranks must make it. The keywords are those of FSDP1 wherever FSDP2 has
    the like; one that has none is refused.

    Args:
        accelerator: As in `Strategy`.
        parallel_devices: As in `ParallelStrategy`.
        cluster_environment: As in `ParallelStrategy`.
        precision: As in `Strategy`.
        process_group_backend: torch's backend ("gloo", "nccl"); None: what fits the devices.
        timeout: How long a collective waits for the other ranks.
        cpu_offload: Parameters, gradients and optimizer states in host memory (True, or torch's CPUOffload).
        mixed_precision: torch's MixedPrecision or MixedPrecisionPolicy; None: by `precision=`.
        auto_wrap_policy: Which modules are gathered and freed together: a set of classes (an empty one: the
            model is one group), a function (module) -> bool, or a policy of torch.distributed.fsdp.wrap.
            None: repeated blocks and large layers. All ranks must call these modules, in one order.
        activation_checkpointing: A module class, or a list of them: see the next.
        activation_checkpointing_policy: Which modules compute their activations again in backward; as
            `auto_wrap_policy`.
        sharding_strategy: "FULL_SHARD" (zero3), "SHARD_GRAD_OP" (zero2: parameters stay whole between forward
            and backward), "HYBRID_SHARD" (split within a node, replicated across), "_HYBRID_SHARD_ZERO2",
            "NO_SHARD", or torch's ShardingStrategy.
        state_dict_type: "sharded" or "full": what `fabric.save` writes without `format=`.
        device_mesh: (replicate, shard) sizes, or a DeviceMesh; None: all ranks.
        checkpoint_io: As in `Strategy`.
        start_method: "popen" re-runs the script per rank; "spawn", "fork", "forkserver" run a function.
        startup_timeout: How long ranks wait for each other at the start.
        find_unused_parameters: Whether ranks may use different parameters in one step (conditional branches).
            A parameter that nobody used then has a gradient of zeros instead of none. Without a policy the
            model is then one group; modules that a policy names are still called by all ranks.
        context_parallel: `ContextParallel(...)`: long sequences are divided over ranks; None: they are not.
        kwargs: Further keywords of FSDP1: limit_all_gathers, use_orig_params, sync_module_states,
            forward_prefetch, backward_prefetch, ignored_modules, ignored_states, param_init_fn, device_id;
            and `reshard_after_forward` of FSDP2.

    Raises:
        ConfigurationError: A keyword or value that FSDP2 has nothing like; when `Fabric` is made: sizes of a
            mesh that do not multiply to the number of ranks.
        ArgumentTypeError: A policy of the wrong kind.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(seconds=1800),
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: type[Module] | list[type[Module]] | None = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "sharded",
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        *,
        checkpoint_io: CheckpointIO | None = None,
        start_method: StartMethod = "popen",
        startup_timeout: timedelta = timedelta(minutes=10),
        find_unused_parameters: bool = False,
        context_parallel: ContextParallel | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision)
        self._set_processes(process_group_backend, timeout, startup_timeout, start_method, context_parallel)
        own = {
            "cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
            "auto_wrap_policy": auto_wrap_policy,
            "activation_checkpointing": activation_checkpointing,
            "activation_checkpointing_policy": activation_checkpointing_policy,
            "sharding_strategy": sharding_strategy,
            "state_dict_type": state_dict_type,
            "device_mesh": device_mesh,
            "find_unused_parameters": find_unused_parameters,
        }
        settings = ShardSettings(**translate(own, kwargs))
        self.layout: FullyShard = FullyShard(settings)
        self.state_dict_type = state_dict_type
        self.sharding_strategy, self.cpu_offload = sharding_strategy, cpu_offload

    @property
    def mixed_precision_config(self) -> Any:
        """The MixedPrecisionPolicy that parameters are gathered and gradients reduced by."""
        self.layout.policy = self._precision.policy
        return self.layout.precision_policy()
