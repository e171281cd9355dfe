"""Errors of DDP that cannot average gradients, and of torch that computes with parts, in the user's words."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fabric.core.errors import UsageError
from fabric.core.source import format_line, is_user_code
from fabric.strategies._torch import computes_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
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


def translate_ddp_error(error: RuntimeError, graph: bool) -> None:
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


def converted(name: str, now: Tensor) -> UsageError:
    """The error for a model that was moved or converted after setup."""
    return UsageError(
        f"{name} was moved or converted after fabric.setup (now {now.dtype}, {now.device}), and ranks would "
        "not average its gradient. Convert the model before fabric.setup, or write Fabric(precision=...). "
        "For other uses convert a copy of what fabric.whole(model) gives."
    )


def split_error(
    error: BaseException, call: Callable[..., Any], root: Any, method: bool, marked: bool
) -> UsageError | None:
    """Return the error to raise in place of `error`; None if it has another cause.

    Args:
        error: What a forward or method of a split model raised.
        call: The forward or method.
        root: The outermost split module.
        method: Whether `call` is a method.
        marked: Whether that method was marked as a forward.
    """
    unmarked = method and not marked
    half = unmarked and "dtype" in str(error) and computes_in(root) is not None
    if not isinstance(error, RuntimeError) or not (half or "mixed torch.Tensor and DTensor" in str(error)):
        return None
    places = [p for p in traceback.extract_tb(error.__traceback__) if is_user_code(p.filename)]
    where = f" ({format_line(places[-1].filename, places[-1].lineno or 0)})" if places else ""
    model, name = type(root).__name__.removeprefix("FSDP"), getattr(call, "__name__", "")
    fix = (
        f"Write model.mark_forward_method({name!r}) after fabric.setup."
        if unmarked
        else "If it belongs to a layer that is not called here: call the layer, or leave its class out of "
        "auto_wrap_policy. If a layer that your function made parallel gave it: leave "
        "use_local_output=False out. Else write .full_tensor() on it, on all ranks."
    )
    return UsageError(
        f"{f'{model}.{name}' if method else f'The forward of {model}'} computes{where} with a tensor that is "
        f"split over ranks, or that only a forward has in its dtype: {str(error)[:200]}. {fix}"
    )
