"""What a replica says that cannot average its gradients, in its user's words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch.distributed as dist

from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from torch.nn import Module

TWICE = ("mark a variable ready only once", "!unmarked_param_indices.empty()")
"""What the reducer says of a gradient that comes again; the second where torch has no words for it."""


def unused_parameters(module: Module, names: list[str], error: RuntimeError) -> Exception:
    """The error for gradients that are missing, with names; torch says their numbers."""
    found = re.search(r"did not receive grad for rank \d+:([ \d]*)", str(error))
    if found is None:
        return error
    unused = [names[int(i)] for i in found.group(1).split() if int(i) < len(names)]
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    way = (
        "They were frozen after fabric.setup: freeze them before it"
        if unused and frozen.issuperset(unused)
        else "If they are unused on purpose, freeze them before fabric.setup"
    )
    return UsageError(
        f"Rank {dist.get_rank()}: these parameters of {type(module).__name__} got no gradient in "
        f"this backward, so the gradients of the ranks cannot be averaged: {', '.join(unused)}. {way}, or "
        'write Fabric(strategy="ddp_find_unused_parameters_true"); with other strategies pass them '
        "find_unused_parameters=True."
    )


def tell_apart(error: RuntimeError, graph: bool) -> None:
    """Raise a better error than torch's for what a reducer cannot do.

    Args:
        error: What torch raised.
        graph: Whether it was a backward with create_graph=True.
    """
    if any([sign in str(error) for sign in TWICE]):
        raise UsageError(
            f"Rank {dist.get_rank()}: DDP got the gradient of a parameter twice in one backward. Activation "
            "checkpoints with use_reentrant=True do so where several forwards meet in one backward, where a "
            "layer is called or a parameter is used once more, or under find_unused_parameters. Write "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        ) from error
    if graph and "leaf Variable that requires grad" in str(error):
        raise UsageError(
            "backward(create_graph=True) cannot go through DDP: what averages gradients is no part of a "
            "graph. For a penalty on gradients write torch.autograd.grad(outputs, inputs, create_graph=True) "
            "and fabric.backward(loss) of the loss that has the penalty."
        ) from error


def thawed_late(name: str) -> UsageError:
    """The error for a parameter that DDP did not take in, since it was frozen then."""
    return UsageError(
        f"Parameter {name} was frozen at fabric.setup and requires a gradient now, which ranks would not "
        "average. Set the model up while all that is trained later has requires_grad=True, and freeze it "
        'after; with "ddp" write Fabric(strategy="ddp_find_unused_parameters_true"), pass other strategies '
        "find_unused_parameters=True. Or set a new copy up for the next phase."
    )
