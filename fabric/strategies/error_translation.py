"""Errors with names and fixes in place of torch's: of DDP's reducer, and of operations on DTensors."""

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
    from torch.nn import Module, Parameter

TWICE = ("mark a variable ready only once", "!unmarked_param_indices.empty()")
"""Texts of the reducer's errors for a second gradient of one parameter; the second is a bare assertion."""
REPLACED = (
    "Change the model before fabric.setup, or set up a copy of the changed one: "
    "model = fabric.setup_module(copy.deepcopy(model.module)), with a new optimizer"
)
"""What to write if parameters of a model were replaced."""


def missing_gradients_error(
    module: Module, names: list[str], trained: list[Parameter], error: RuntimeError
) -> Exception:
    """Return the error for missing gradients with parameter names; torch's has indices."""
    found = re.search(r"did not receive grad for rank \d+:([ \d]*)", str(error))
    if found is None:
        return error
    indices = [int(i) for i in found.group(1).split() if int(i) < len(names)]
    unused, now = [names[i] for i in indices], dict(module.named_parameters())
    text = (
        f"Rank {dist.get_rank()}: these parameters of {type(module).__name__} got no gradient in "
        f"this backward, so the gradients of the ranks cannot be averaged: {', '.join(unused)}. "
    )
    if any([now.get(names[i]) is not trained[i] for i in indices]):
        return UsageError(f"{text}They were replaced in the model after fabric.setup. {REPLACED}.")
    frozen = {name for name, p in now.items() if not p.requires_grad}
    way = (
        "They were frozen after fabric.setup: freeze them before it"
        if unused and frozen.issuperset(unused)
        else "If they are unused on purpose, freeze them before fabric.setup"
    )
    return UsageError(
        f'{text}{way}, or write Fabric(strategy="ddp_find_unused_parameters_true"); with other strategies '
        "pass them find_unused_parameters=True."
    )


def translate_ddp_error(error: RuntimeError, graph: bool) -> None:
    """Raise a clearer error than torch's, if the reducer does not support the backward.

    Args:
        error: The error that torch raised.
        graph: Whether the backward had create_graph=True.
    """
    if any([sign in str(error) for sign in TWICE]):
        raise UsageError(
            f"Rank {dist.get_rank()}: DDP got the gradient of a parameter twice in one backward. The cause "
            "are activation checkpoints with use_reentrant=True, if a backward has several forwards, a layer "
            "or parameter is used twice, or find_unused_parameters is set. Write "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        ) from error
    if graph and "leaf Variable that requires grad" in str(error):
        raise UsageError(
            "backward(create_graph=True) is not supported by DDP: its all-reduce is not in the graph. For "
            "a penalty on gradients write torch.autograd.grad(outputs, inputs, create_graph=True), and call "
            "fabric.backward(loss) with the penalty in the loss."
        ) from error


def unfrozen_after_setup(name: str) -> UsageError:
    """Return the error for a parameter that DDP does not average, since it was frozen at setup."""
    return UsageError(
        f"Parameter {name} was frozen at fabric.setup and requires a gradient now, which would not be "
        "averaged. Freeze parameters that are trained later after fabric.setup, not before; then write "
        'Fabric(strategy="ddp_find_unused_parameters_true") in place of "ddp", or pass '
        "find_unused_parameters=True to other strategies. Or set up a new copy for the next phase."
    )


def converted_after_setup(name: str, now: Tensor) -> UsageError:
    """Return the error for a model that was moved or converted after setup."""
    return UsageError(
        f"{name} was moved or converted after fabric.setup (now {now.dtype}, {now.device}), and its gradient "
        "would not be averaged. Convert the model before fabric.setup, or write Fabric(precision=...). For "
        "other uses convert a copy of fabric.whole(model)."
    )


def translate_dtensor_error(
    error: BaseException, call: Callable[..., Any], root: Any, method: bool, marked: bool
) -> UsageError | None:
    """Return the error to raise in place of `error`, or None if its cause is not an unexpected DTensor.

    Args:
        error: The error that a forward or method of a sharded model raised.
        call: The forward or method.
        root: The outermost sharded module.
        method: Whether `call` is a method.
        marked: Whether that method was marked by `mark_forward_method`.
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
        else "If it is a parameter of a layer that is not called: call the layer, or remove its class from "
        "auto_wrap_policy. If it is the output of a layer that your function made parallel: remove "
        "use_local_output=False. Else call .full_tensor() on it, on all ranks."
    )
    return UsageError(
        f"{f'{model}.{name}' if method else f'The forward of {model}'} computes{where} with a tensor that is "
        f"split over ranks, or that is cast only in a forward: {str(error)[:200]}. {fix}"
    )
