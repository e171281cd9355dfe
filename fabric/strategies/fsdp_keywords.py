"""What users write for FSDP1, in terms of FSDP2: pure functions, a table of what is kept, refused, or needless."""

from __future__ import annotations

from typing import Any

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.registry import did_you_mean

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
        raise ConfigurationError(
            f"sharding_strategy={strategy!r} is not one of {', '.join(map(repr, _SHARDING))}."
            f"{did_you_mean(name, tuple(_SHARDING))}"
        )
    return dict(_SHARDING[name])


def translate(cpu_offload: Any, mixed_precision: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Settings behind the other keywords of FSDP1.

    Raises:
        ConfigurationError: An unknown keyword, or a value that FSDP2 has nothing like.
        ArgumentTypeError: A value of the wrong kind.
    """
    unknown = [name for name in keywords if name not in _KNOWN]
    if unknown:
        raise ConfigurationError(
            f"FSDPStrategy has no keyword {unknown[0]!r}.{did_you_mean(unknown[0], _KNOWN)} It takes those of its "
            f"signature and {', '.join(_KNOWN)}."
        )
    for name, (only, why) in _SETTLED.items():
        if keywords.get(name, only) != only:
            raise ConfigurationError(f"{name}={keywords[name]!r} cannot be had: {why}. Leave {name} out.")
    settings: dict[str, Any] = {
        "offload": _offload(cpu_offload),
        "mixed_precision": _precision(mixed_precision),
        "ignored": _ignored(keywords),
        "init": keywords.get("param_init_fn"),
        "prefetch": bool(keywords.get("forward_prefetch", False)),
    }
    if "reshard_after_forward" in keywords:
        settings["reshard_after_forward"] = keywords["reshard_after_forward"]
    return settings


def _offload(value: Any) -> bool:
    """True, False, or what torch's CPUOffload says."""
    offload = getattr(value, "offload_params", value)
    if type(value).__name__ == "CPUOffloadPolicy":
        return True
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
            f"mixed_precision={value!r} must be a MixedPrecision or MixedPrecisionPolicy of torch.distributed.fsdp. "
            f'For a name write Fabric(precision="bf16-mixed").'
        )
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if value.buffer_dtype is not None:
        raise ConfigurationError(
            f"mixed_precision.buffer_dtype={value.buffer_dtype} cannot be had: FSDP2 leaves buffers as they are. "
            f"Cast them in the model (model.running_mean = ...), or leave buffer_dtype out."
        )
    return MixedPrecisionPolicy(
        param_dtype=value.param_dtype,
        reduce_dtype=value.reduce_dtype,
        cast_forward_inputs=value.cast_forward_inputs or value.cast_root_forward_inputs,
    )


def _ignored(keywords: dict[str, Any]) -> set[Any]:
    modules = list(keywords.get("ignored_modules") or ())
    states = list(keywords.get("ignored_states") or ())
    found = [s for s in states if not hasattr(s, "parameters")]
    for module in [*modules, *[s for s in states if hasattr(s, "parameters")]]:
        found += list(module.parameters())
    return set(found)
