"""`FSDPStrategy`: parameters, gradients and optimizer states sharded over ranks by FSDP2.

Arguments of FSDP1 are validated by one table, and translated to those of FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import Module

from fabric.core.errors import ConfigurationError
from fabric.strategies.fsdp.fully_shard import FullyShard, ShardSettings
from fabric.strategies.parallel import ParallelStrategy, check_keywords
from fabric.strategies.sharding.blocks import check_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from fabric.accelerators.accelerator import Accelerator
    from fabric.checkpoint.checkpoint_io import CheckpointIO
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from fabric.precision.precision import Precision
    from fabric.strategies.context_parallel.part import ContextParallel
    from fabric.strategies.parallel import StartMethod


_SHARDING: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"reshard_after_forward": False},
    "HYBRID_SHARD": {"hybrid": True},
    "_HYBRID_SHARD_ZERO2": {"hybrid": True, "reshard_after_forward": False},
    "NO_SHARD": {"whole": True},
}


def _is_mesh(mesh: Any) -> bool:
    if not isinstance(mesh, tuple | list):
        return mesh is None or hasattr(mesh, "mesh_dim_names")
    return 1 <= len(mesh) <= 2 and all([type(size) is int and size > 0 for size in mesh])


_FLAG: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, bool), "True or False")
_ALWAYS: tuple[Callable[[Any], bool], str] = (lambda value: value is True, "True, which is how FSDP2 works")
_FITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "sharding_strategy": (
        lambda value: getattr(value, "name", value) in [*_SHARDING],
        f"one of {', '.join(map(repr, _SHARDING))}",
    ),
    "state_dict_type": (lambda value: value in ("full", "sharded"), "'full' or 'sharded'"),
    "device_mesh": (
        _is_mesh,
        "(replicate, shard) sizes, two whole numbers of 1 or more, or a DeviceMesh. Write device_mesh=(2, 4) "
        "for 2 replicas that are split over 4 ranks each",
    ),
    "cpu_offload": (
        lambda value: isinstance(value, bool | None) or "Offload" in type(value).__name__,
        "True, False or a CPUOffload(offload_params=...)",
    ),
    "mixed_precision": (
        lambda value: value is None or type(value).__name__ in ("MixedPrecision", "MixedPrecisionPolicy"),
        "a MixedPrecision or MixedPrecisionPolicy of torch.distributed.fsdp. For a name write "
        'Fabric(precision="bf16-mixed")',
    ),
    "param_init_fn": (
        lambda value: value is None or callable(value),
        "a function (module) that initialises its own parameters",
    ),
    "reshard_after_forward": (
        lambda value: isinstance(value, bool | None) or (isinstance(value, int) and value > 1),
        "True (parameters are freed after forward), False (they stay), or a number of ranks above 1, over "
        "which they are split between forward and backward",
    ),
    "find_unused_parameters": _FLAG,
    "forward_prefetch": _FLAG,
    "use_orig_params": _ALWAYS,
    "limit_all_gathers": _ALWAYS,
    "sync_module_states": _ALWAYS,
}
"""{argument: (predicate of valid values, description of them)}."""

_OTHERS = ("auto_wrap_policy", "ignored_modules", "ignored_states", "backward_prefetch", "device_id")
"""Arguments without a check here. The last two have no effect in FSDP2."""


class FSDPStrategy(ParallelStrategy):
    """Sharded data parallel training by torch's `fully_shard` (FSDP2), one process per device.

    `fabric.setup` shards the model in place, group by group: its parameters become DTensors. Optimizers may
    be created before or after setup. `clip_gradients`, `save` and `load` act on the full model, with the
    user's keys. Every forward is a collective: all ranks must make it. Arguments are those of FSDP1; one
    without a counterpart in FSDP2 is an error.

    Args:
        accelerator: As in `Strategy`.
        parallel_devices: As in `ParallelStrategy`.
        cluster_environment: As in `ParallelStrategy`.
        precision: As in `Strategy`.
        process_group_backend: torch's backend ("gloo", "nccl"); None: the one for the devices.
        timeout: How long a collective waits for the other ranks.
        cpu_offload: Parameters, gradients and optimizer states in host memory (True, or torch's CPUOffload).
        mixed_precision: torch's MixedPrecision or MixedPrecisionPolicy; None: by `precision=`.
        auto_wrap_policy: Modules that are unsharded and resharded as a group: a set of classes (empty: the
            model is one group), a function (module) -> bool, or a policy of torch.distributed.fsdp.wrap.
            None: repeated blocks and large layers. All ranks must call these modules in the same order.
        activation_checkpointing: A module class, or a list of them: see the next argument.
        activation_checkpointing_policy: Modules that recompute their activations in backward; values as of
            `auto_wrap_policy`.
        sharding_strategy: "FULL_SHARD" (zero3), "SHARD_GRAD_OP" (zero2: parameters stay unsharded between
            forward and backward), "HYBRID_SHARD" (sharded within a node, replicated across nodes),
            "_HYBRID_SHARD_ZERO2", "NO_SHARD", or torch's ShardingStrategy.
        state_dict_type: "sharded" or "full": the format of `fabric.save` without `format=`.
        device_mesh: (replicate, shard) sizes, or a DeviceMesh; None: all ranks.
        checkpoint_io: As in `Strategy`.
        start_method: "popen" re-runs the script per rank; "spawn", "fork", "forkserver" run a function.
        startup_timeout: How long ranks wait for each other at startup.
        find_unused_parameters: Whether ranks may use different parameters in one step (conditional branches).
            The mean counts zeros for ranks without a gradient; if no rank has one it stays None. Without a
            policy the model is one group. All ranks must still call the modules that a policy chooses.
        context_parallel: `ContextParallel(...)` shards long sequences over ranks; None: no sharding.
        kwargs: Other arguments of FSDP1: limit_all_gathers, use_orig_params, sync_module_states,
            forward_prefetch, backward_prefetch, ignored_modules, ignored_states, param_init_fn, device_id;
            and `reshard_after_forward` of FSDP2.

    Raises:
        ConfigurationError: An argument or value without a counterpart in FSDP2; in `Fabric(...)`: the mesh
            sizes do not multiply to the number of ranks.
        ArgumentTypeError: A policy has the wrong type.

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
            "activation_checkpointing": activation_checkpointing,
            "activation_checkpointing_policy": activation_checkpointing_policy,
            "sharding_strategy": sharding_strategy,
            "state_dict_type": state_dict_type,
            "device_mesh": device_mesh,
            "find_unused_parameters": find_unused_parameters,
        }
        listed = {name: [*value] if isinstance(value, Iterator) else value for name, value in kwargs.items()}
        self._own, self._fsdp_kwargs = own, {"auto_wrap_policy": auto_wrap_policy, **listed}
        self.layout: FullyShard = FullyShard(self._settings())
        self.state_dict_type = state_dict_type
        self.sharding_strategy, self.cpu_offload = sharding_strategy, cpu_offload

    def _settings(self) -> ShardSettings:
        check_keywords(self, FSDPStrategy, self._fsdp_kwargs, (*_FITS, *_OTHERS))
        return ShardSettings(**_translate(self._own, self._fsdp_kwargs))

    def setup_module(self, module: Module) -> Module:
        """Return `module` with sharded parameters. All ranks must call this."""
        self.layout.settings = self._settings()  # programs may have changed `_fsdp_kwargs` before setup
        return super().setup_module(module)

    @property
    def mixed_precision_config(self) -> Any:
        """The MixedPrecisionPolicy of the all-gather of parameters and the reduction of gradients."""
        self.layout.policy = self._precision.policy
        return self.layout.precision_policy()


def _translate(signature: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `ShardSettings` for those of `FSDPStrategy`.

    Args:
        signature: Arguments in the signature of `FSDPStrategy`, by name.
        further: Other arguments of FSDP1, by name.

    Raises:
        ConfigurationError: A value without a counterpart in FSDP2.
        ArgumentTypeError: A policy has the wrong type.
    """
    given = {**signature, **further}
    for name, (fits, must) in _FITS.items():
        if name in given and not fits(given[name]):
            raise ConfigurationError(f"{name}={given[name]!r} must be {must}.")
    strategy, mesh, blocks = given["sharding_strategy"], given["device_mesh"], given["auto_wrap_policy"]
    if getattr(strategy, "name", strategy) == "NO_SHARD" and mesh is not None:
        raise ConfigurationError(
            f"sharding_strategy='NO_SHARD' keeps a replica on every rank, but device_mesh={mesh!r} shards "
            f"over ranks. Leave one of the two out."
        )
    check_policy(blocks, "auto_wrap_policy")
    settings = {
        **_SHARDING[getattr(strategy, "name", strategy)],
        "mesh": mesh,
        "unused": given["find_unused_parameters"],
        "blocks": set() if given["find_unused_parameters"] and blocks is None else blocks,
        "checkpointed": _checkpointed(given),
        "offload": _offload(given["cpu_offload"]),
        "mixed_precision": _precision(given["mixed_precision"]),
        "ignored": _ignored(given),
        "init": given.get("param_init_fn"),
        "prefetch": given.get("forward_prefetch", False),
    }
    if "reshard_after_forward" in given:
        settings["reshard_after_forward"] = given["reshard_after_forward"]
    return settings


def _checkpointed(given: dict[str, Any]) -> Any:
    """Return the modules or the policy for activation checkpointing, of which at most one may be given."""
    modules, policy = given["activation_checkpointing"], given["activation_checkpointing_policy"]
    if modules is not None and policy is not None:
        raise ConfigurationError(
            "activation_checkpointing and activation_checkpointing_policy were both given, and mean the "
            "same. Keep the policy."
        )
    check_policy(modules, "activation_checkpointing")
    check_policy(policy, "activation_checkpointing_policy")
    return modules or policy


def _offload(value: Any) -> bool:
    """Return the flag of True, False, or torch's CPUOffload, CPUOffloadPolicy or OffloadPolicy."""
    return bool(getattr(value, "offload_params", value is True or type(value).__name__ == "CPUOffloadPolicy"))


def _precision(value: Any) -> Any:
    """Return FSDP2's policy for FSDP1's MixedPrecision; other values unchanged."""
    if type(value).__name__ != "MixedPrecision":
        return value
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for name in ("buffer_dtype", "keep_low_precision_grads"):
        if getattr(value, name):
            raise ConfigurationError(
                f"mixed_precision.{name}={getattr(value, name)} is not supported: FSDP2 does not cast "
                "buffers, and gradients have the dtype of their parameters. Leave it out and cast buffers in "
                'the model, or write Fabric(precision="bf16-true").'
            )
    return MixedPrecisionPolicy(
        param_dtype=value.param_dtype,
        reduce_dtype=value.reduce_dtype or value.param_dtype,  # FSDP1's default
        cast_forward_inputs=value.cast_forward_inputs or value.cast_root_forward_inputs,
    )


def _ignored(given: dict[str, Any]) -> set[Any]:
    """Return the parameters of `ignored_modules` and `ignored_states`."""
    found: list[Any] = []
    for name, kinds in (("ignored_modules", Module), ("ignored_states", Module | torch.nn.Parameter)):
        value = given.get(name)
        one = isinstance(value, Module | torch.Tensor) or not hasattr(value, "__iter__")
        listed = [] if value is None else [None] if one else list(value)
        if not all([isinstance(item, kinds) for item in listed]):
            raise ConfigurationError(
                f"{name}={value!r} must be a list of submodules of the model. Write {name}=[model.head]."
            )
        for item in listed:
            found += item.parameters() if isinstance(item, Module) else [item]
    if any([parameter.is_meta for parameter in found]):
        raise ConfigurationError(
            "Ignored parameters are on the meta device: setup would replace them by others, which it shards. "
            "Initialise them before FSDPStrategy(...) is created."
        )
    return set(found)
