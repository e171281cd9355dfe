"""Names of reductions, as users write them, and torch's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.registry import did_you_mean

_OPS = {
    "sum": "SUM",
    "mean": "AVG",
    "avg": "AVG",
    "min": "MIN",
    "max": "MAX",
    "product": "PRODUCT",
    "prod": "PRODUCT",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


def torch_op(op: Any) -> Any:
    """torch's ReduceOp for a name ("mean", "SUM", ...) or a ReduceOp.

    Raises:
        ConfigurationError: The name means no reduction.
        ArgumentTypeError: Neither a name nor a ReduceOp.
    """
    if not isinstance(op, str):
        if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
            return op
        raise ArgumentTypeError(
            f"reduce_op={op!r} is a {type(op).__name__}. Write a name such as 'mean', or "
            "torch.distributed.ReduceOp.SUM."
        )
    name = _OPS.get(op.lower())
    if name is None:
        raise ConfigurationError(
            f"reduce_op={op!r} is not a reduction.{did_you_mean(op, _OPS)} Write one of 'mean', 'sum', "
            "'min', 'max', 'product'."
        )
    return getattr(dist.ReduceOp, name)
