"""What users write for FSDP1, in terms of FSDP2: pure functions, a table of what is settled or needless."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.registry import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHARDING: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"reshard_after_forward": False},
    "HYBRID_SHARD": {"hybrid": True},
    "_HYBRID_SHARD_ZERO2": {"hybrid": True, "reshard_after_forward": False},
    "NO_SHARD": {"whole": True},
}
_SETTLED = {
    "use_orig_params": (True, "FSDP2 always keeps the parameters themselves"),
    "limit_all_gathers": (True, "FSDP2 always limits how far gathering runs ahead"),
    "sync_module_states": (True, "rank zero's values always count"),
}
"""Keywords whose one value is how FSDP2 works, and why the other cannot be had."""

_NEEDLESS = ("backward_prefetch", "device_id")
"""Keywords that FSDP2 decides by itself, without a change of numbers."""

_KNOWN = (*_SETTLED, *_NEEDLESS, "forward_prefetch", "ignored_modules", "ignored_states", "param_init_fn",
          "reshard_after_forward")  # fmt: skip


def sharding(strategy: Any) -> dict[str, Any]:
    """Settings behind `sharding_strategy`: a name, or torch's ShardingStrategy.

    Raises:
        ConfigurationError: No such strategy.
    """
    name = getattr(strategy, "name", strategy)
    if not isinstance(name, str) or name not in _SHARDING:
        close = get_close_matches(str(name).upper(), _SHARDING, n=1, cutoff=0.5)
        raise ConfigurationError(
            f"sharding_strategy={strategy!r} is not one of {', '.join(map(repr, _SHARDING))}."
            f"{f' Did you mean {close[0]!r}?' if close else ''}"
        )
    return dict(_SHARDING[name])


def check_mesh(mesh: Any, settings: dict[str, Any]) -> None:
    """Raise unless `device_mesh` can be used with what `sharding` made of the strategy.

    Raises:
        ArgumentTypeError: Neither sizes nor a DeviceMesh.
        ConfigurationError: Not to be split, and a mesh to be split over.
    """
    if mesh is None:
        return
    if settings.get("whole"):
        raise ConfigurationError(
            f"sharding_strategy='NO_SHARD' keeps a replica on every rank, but device_mesh={mesh!r} says over "
            f"which ranks to split. Leave one of the two out."
        )
    if isinstance(mesh, tuple | list):
        if 1 <= len(mesh) <= 2 and all([type(size) is int and size > 0 for size in mesh]):
            return
    elif hasattr(mesh, "mesh_dim_names"):
        return
    raise ArgumentTypeError(
        f"device_mesh={mesh!r} must be (replicate, shard) sizes, two whole numbers of 1 or more, or a "
        f"DeviceMesh. Write device_mesh=(2, 4) for 2 replicas that are split over 4 ranks each."
    )


def check_ranks(mesh: Any, devices: int, num_nodes: int) -> None:
    """Raise if the sizes of a mesh do not multiply to the number of ranks.

    Raises:
        ConfigurationError: They do not.
    """
    world = devices * num_nodes
    if not isinstance(mesh, tuple | list) or torch.Size(mesh).numel() == world:
        return
    halves = num_nodes == 1 and world >= 4 and world % 2 == 0
    fits = (2, world // 2) if halves else (num_nodes, devices)
    raise ConfigurationError(
        f"device_mesh={tuple(mesh)} has {torch.Size(mesh).numel()} ranks, but devices={devices} and "
        f"num_nodes={num_nodes} make {world}. Write (replicate, shard) sizes that multiply to {world}, such "
        f"as device_mesh={fits}."
    )


def translate(
    cpu_offload: Any, mixed_precision: Any, keywords: dict[str, Any], signature: Iterable[str]
) -> dict[str, Any]:
    """Settings behind the other keywords of FSDP1.

    Args:
        cpu_offload: As in `FSDPStrategy`.
        mixed_precision: As in `FSDPStrategy`.
        keywords: Those beside the signature of `FSDPStrategy`.
        signature: Names of the signature, for errors.

    Raises:
        ConfigurationError: An unknown keyword, or a value that FSDP2 has nothing like.
        ArgumentTypeError: A value of the wrong kind.
    """
    unknown = [name for name in keywords if name not in _KNOWN]
    if unknown:
        close = did_you_mean(unknown[0], (*signature, *_KNOWN))
        raise ConfigurationError(
            f"FSDPStrategy has no keyword {unknown[0]!r}.{close} It takes those of its signature and "
            f"{', '.join(_KNOWN)}."
        )
    init, prefetch = keywords.get("param_init_fn"), keywords.get("forward_prefetch", False)
    if init is not None and not callable(init):
        raise ArgumentTypeError(
            f"param_init_fn={init!r} must be a function (module) that initialises its own parameters."
        )
    if not isinstance(prefetch, bool):
        raise ArgumentTypeError(f"forward_prefetch={prefetch!r} must be True or False.")
    for name, (only, why) in _SETTLED.items():
        if keywords.get(name, only) != only:
            raise ConfigurationError(f"{name}={keywords[name]!r} cannot be had: {why}. Leave {name} out.")
    settings: dict[str, Any] = {
        "offload": _offload(cpu_offload),
        "mixed_precision": _precision(mixed_precision),
        "ignored": _ignored(keywords),
        "init": keywords.get("param_init_fn"),
        "prefetch": prefetch,
    }
    if "reshard_after_forward" in keywords:
        settings["reshard_after_forward"] = _reshard(keywords["reshard_after_forward"])
    return settings


def _reshard(value: Any) -> bool | int | None:
    if value is None or isinstance(value, bool) or (isinstance(value, int) and value > 1):
        return value
    raise ArgumentTypeError(
        f"reshard_after_forward={value!r} must be True (parameters are freed after forward), False (they "
        f"stay), or a number of ranks above 1, over which they are split between forward and backward."
    )


def _offload(value: Any) -> bool:
    """True, False, or what torch's CPUOffload, CPUOffloadPolicy or OffloadPolicy says."""
    offload = getattr(value, "offload_params", value)
    if type(value).__name__ in ("CPUOffloadPolicy", "OffloadPolicy"):
        return type(value).__name__ == "CPUOffloadPolicy"
    if not isinstance(offload, bool | None):
        raise ArgumentTypeError(
            f"cpu_offload={value!r} must be True, False or a CPUOffload(offload_params=...)."
        )
    return bool(offload)


def _precision(value: Any) -> Any:
    """FSDP2's policy for FSDP1's MixedPrecision; None stays None."""
    if value is None or type(value).__name__ == "MixedPrecisionPolicy":
        return value
    if type(value).__name__ != "MixedPrecision":
        raise ArgumentTypeError(
            f"mixed_precision={value!r} must be a MixedPrecision or MixedPrecisionPolicy of "
            f'torch.distributed.fsdp. For a name write Fabric(precision="bf16-mixed").'
        )
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if value.buffer_dtype is not None:
        raise ConfigurationError(
            f"mixed_precision.buffer_dtype={value.buffer_dtype} cannot be had: FSDP2 leaves buffers as they "
            f"are. Cast them in the model (model.running_mean = ...), or leave buffer_dtype out."
        )
    if value.keep_low_precision_grads:
        raise ConfigurationError(
            "mixed_precision.keep_low_precision_grads=True cannot be had: under FSDP2 gradients have the "
            'dtype of their parameters. Leave it out, or write Fabric(precision="bf16-true").'
        )
    return MixedPrecisionPolicy(
        param_dtype=value.param_dtype,
        reduce_dtype=value.reduce_dtype or value.param_dtype,  # FSDP1's default, whatever FSDP2's is
        cast_forward_inputs=value.cast_forward_inputs or value.cast_root_forward_inputs,
    )


def _ignored(keywords: dict[str, Any]) -> set[Any]:
    found: list[Any] = []
    for name, kinds in (("ignored_modules", (Module,)), ("ignored_states", (Module, torch.nn.Parameter))):
        given = keywords.get(name)
        if given is None:
            continue
        several = not isinstance(given, str | Module | torch.Tensor) and hasattr(given, "__iter__")
        listed = list(given) if several else [given]
        wrong = [item for item in listed if not isinstance(item, kinds)]
        if wrong or not several:
            raise ArgumentTypeError(
                f"{name} takes a list of {' or '.join([f'{kind.__name__}s' for kind in kinds])} of the "
                f"model, but {'has' if several else 'is'} a {type((wrong or listed)[0]).__name__}. Write "
                f"{name}=[model.head]."
            )
        for item in listed:
            found += list(item.parameters()) if isinstance(item, Module) else [item]
    if any([parameter.is_meta for parameter in found]):
        raise ConfigurationError(
            "Ignored parameters are on the meta device: setup would replace them with others, which it "
            "splits. Give them values before FSDPStrategy(...) is made."
        )
    return set(found)
