"""Checks of values of arguments: flags, limits, numbers of items. Called by the verbs before any change."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch

from fabric.core.errors import ArgumentTypeError, ConfigurationError


def check_flags(verb: str, **flags: Any) -> None:
    """Raise ArgumentTypeError for a flag of `verb` that is not a bool, None, 0 or 1."""
    for name, value in flags.items():
        if not (
            value is None
            or type(value).__name__ in ("bool", "bool_")
            or (isinstance(value, int) and value in (0, 1))
        ):
            shown = repr(value) if value is None or isinstance(value, Real | str) else type(value).__name__
            raise ArgumentTypeError(f"{verb}: {name}={shown} must be True or False.")


def check_limits(clip_val: Any, max_norm: Any, norm_type: Any) -> None:
    """Raise unless exactly one limit of `clip_gradients` is given, and it is a number of 0 or more.

    Raises:
        ArgumentTypeError: A limit is not a number.
        ConfigurationError: Both limits, none, a negative one or NaN.
    """
    advice = "Write clip_val=0.5 to clamp each element, or max_norm=1.0 to scale the total norm."
    if (clip_val is None) == (max_norm is None):
        raise ConfigurationError(
            f"clip_gradients needs one limit, but got clip_val={clip_val!r} and max_norm={max_norm!r}. "
            f"{advice}"
        )
    norm_type = float(norm_type) if norm_type == "inf" else norm_type  # torch accepts this text, too
    for name, value in {"clip_val": clip_val, "max_norm": max_norm, "norm_type": norm_type}.items():
        if isinstance(value, str | bool):
            raise ArgumentTypeError(f"clip_gradients: {name}={value!r} must be a number. {advice}")
        if value is not None and not value >= 0:
            raise ConfigurationError(f"clip_gradients: {name}={value!r} must be 0 or more. {advice}")


def item_count(value: Any, verb: str) -> int | float:
    """Return a number of items as a Python number; for a tensor on a device the host waits.

    Raises:
        ArgumentTypeError: Neither a real number nor a tensor with one.
        ConfigurationError: Negative, not finite, or too large for 64 bits.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"{verb} needs num_items as a number or a one-element tensor, but got {value!r}. "
            f"Count the items of all micro-batches of the step on this rank: num_items += mask.sum()"
        )
    count = int(value) if isinstance(value, Integral) else float(value)
    if not 0 <= count < 2**63:
        raise ConfigurationError(
            f"{verb}: num_items={count} is not a number of items: it must be 0 or more, finite, and less "
            f"than 2**63. Count the items of all micro-batches of the step on this rank."
        )
    return count
