"""Precision names and their dtypes, for all strategies. precision/README.md has the same table."""

from dataclasses import dataclass
from typing import Literal

import torch

from fabric.core.errors import ConfigurationError
from fabric.core.registry import unknown_name_message

PrecisionName = Literal["64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
PrecisionInput = (
    Literal[64, 32, 16] | Literal["64", "32", "16", "bf16"] | PrecisionName
)  # valid values of Fabric(precision=)

_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """Dtypes of the parts of a training step. `None` means "unchanged"."""

    name: PrecisionName
    param: torch.dtype | None
    """Parameters and buffers after `setup`."""
    compute: torch.dtype
    """Matrix products and convolutions."""
    reduce: torch.dtype
    """Gradients while ranks sum them."""
    output: torch.dtype | None
    """Floating-point outputs of `forward`; None: as computed."""
    autocast: bool = False
    """Whether torch.autocast casts to `compute`; otherwise it is the parameters' dtype."""
    loss_scale: bool = False
    """Whether a GradScaler scales the loss."""


_F16, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

POLICIES: dict[str, DtypePolicy] = {
    "64-true": DtypePolicy("64-true", _F64, _F64, _F64, _F32),
    "32-true": DtypePolicy("32-true", None, _F32, _F32, None),
    "16-true": DtypePolicy("16-true", _F16, _F16, _F16, _F32),
    "bf16-true": DtypePolicy("bf16-true", _BF16, _BF16, _BF16, _F32),
    "16-mixed": DtypePolicy("16-mixed", None, _F16, _F32, _F32, autocast=True, loss_scale=True),
    "bf16-mixed": DtypePolicy("bf16-mixed", None, _BF16, _F32, _F32, autocast=True),
}
"""Every precision by name. `output` float32 means `torch.get_default_dtype()` at call time."""


def find_policy(value: object) -> DtypePolicy | None:
    """Return the policy for a value of `precision=`; None: unknown."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    name = str(value)
    return POLICIES.get(_ALIASES.get(name, name))


def parse_precision(value: object) -> DtypePolicy:
    """Return the policy for a value of `precision=`.

    Raises:
        ConfigurationError: The value is unknown; the message has similar names.
    """
    policy = find_policy(value)
    if policy is not None:
        return policy
    raise ConfigurationError(unknown_name_message("precision", value, [*POLICIES]))
