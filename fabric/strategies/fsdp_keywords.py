"""What users write for FSDP1, in terms of FSDP2: pure functions, a table of what is settled or needless."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module, Parameter

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

_KNOWN = (*_SETTLED, *_NEEDLESS, "forward_prefetch", "ignored_modules", "ignored_states", "param_init_fn")


def sharding(strategy: Any) -> dict[str, Any]:
    """Settings behind `sharding_strategy`: a name, or torch's ShardingStrategy.

    Raises:
        ConfigurationError: No such strategy.
    """
    name = getattr(strategy, "name", strategy)
    if name not in _SHARDING:
        raise ConfigurationError(
            f"sharding_strategy={strategy!r} is not one of {', '.join(map(repr, _SHARDING))}."
        )
    return _SHARDING[name]


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
    for name, (only, why) in _SETTLED.items():
        if keywords.get(name, only) != only:
            raise ConfigurationError(f"{name}={keywords[name]!r} cannot be had: {why}. Leave {name} out.")
    return {
        "offload": _offload(cpu_offload),
        "mixed_precision": _precision(mixed_precision),
        "ignored": _ignored([*keywords.get("ignored_modules", ()), *keywords.get("ignored_states", ())]),
        "init": keywords.get("param_init_fn"),
        "prefetch": keywords.get("forward_prefetch", False),
    }


def _offload(value: Any) -> bool:
    """True, False, or what torch's CPUOffload, CPUOffloadPolicy or OffloadPolicy says."""
    if type(value).__name__ in ("CPUOffloadPolicy", "OffloadPolicy"):
        return type(value).__name__ == "CPUOffloadPolicy"
    return bool(getattr(value, "offload_params", value))


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

    if value.buffer_dtype is not None or value.keep_low_precision_grads:
        raise ConfigurationError(
            "mixed_precision with buffer_dtype or keep_low_precision_grads cannot be had: FSDP2 leaves "
            "buffers as they are, and gradients have the dtype of their parameters. Leave them out, or write "
            'Fabric(precision="bf16-true").'
        )
    return MixedPrecisionPolicy(
        param_dtype=value.param_dtype,
        reduce_dtype=value.reduce_dtype or value.param_dtype,  # FSDP1's default, whatever FSDP2's is
        cast_forward_inputs=value.cast_forward_inputs or value.cast_root_forward_inputs,
    )


def _ignored(items: list[Any]) -> set[Any]:
    """The parameters that these modules and parameters are."""
    found: list[Any] = []
    for item in items:
        if not isinstance(item, Module | Parameter):
            raise ArgumentTypeError(
                "ignored_modules and ignored_states take modules and parameters of the model, but have a "
                f"{type(item).__name__}. Write ignored_modules=[model.head]."
            )
        found += list(item.parameters()) if isinstance(item, Module) else [item]
    if any([parameter.is_meta for parameter in found]):
        raise ConfigurationError(
            "Ignored parameters are on the meta device: setup would replace them with others, which it "
            "splits. Give them values before FSDPStrategy(...) is made."
        )
    return set(found)
