"""torch's "mixed torch.Tensor and DTensor" in the user's words: which operation, where, what to write."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any

from fabric.core.errors import UsageError
from fabric.core.source import is_users, line_name
from fabric.core.torch_internals import computes_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module


def split_error(
    error: BaseException, call: Callable[..., Any], root: Module, method: bool, marked: bool
) -> UsageError | None:
    """What to raise in the place of `error`; None where it is another one.

    Args:
        error: What a forward or method of a split model raised.
        call: The forward or method.
        root: The outermost split module.
        method: Whether `call` is a method.
        marked: Whether that method was marked as a forward.
    """
    mixed = re.match(r"(?:aten\.)?(\w+).* got mixed torch.Tensor and DTensor", str(error))
    if not isinstance(error, RuntimeError):
        return None
    if mixed is None:
        return _half_error(error, root, getattr(call, "__name__", "")) if method and not marked else None
    places = [p for p in traceback.extract_tb(error.__traceback__) if is_users(p.filename)]
    where = f" ({line_name(places[-1].filename, places[-1].lineno or 0)})" if places else ""
    model, name = type(root).__name__.removeprefix("FSDP"), getattr(call, "__name__", "")
    verb = f"{model}.{name}" if method else f"The forward of {model}"
    fixes = [
        "If it is a parameter of a layer that is not called here: call the layer, or leave its class out"
    ]
    fixes[0] += " of auto_wrap_policy (in a function of your own: of the calls of fully_shard)."
    if method and not marked:
        fixes.insert(0, f"Write model.mark_forward_method({name!r}) after fabric.setup.")
    if any([_is_parallel(p) for p in root.parameters()]):
        fixes.append("If a layer that your function made parallel gave it: leave use_local_output=False out.")
    return UsageError(
        f"{verb} calls {mixed[1]}{where} with a DTensor, a tensor that is split over ranks, beside plain "
        f"tensors. {' '.join(fixes)} Else write .full_tensor() on it, on all ranks."
    )


def _half_error(error: RuntimeError, root: Any, name: str) -> UsageError | None:
    """Parameters are gathered in the half type for forwards under autocast; this method ran without it."""
    half = computes_in(root)
    if half is None or "dtype" not in str(error):
        return None
    model = type(root).__name__.removeprefix("FSDP")
    return UsageError(
        f"{model}.{name} ran without the mixed precision of forward, and parameters are gathered in {half}: "
        f"{error}. Write model.mark_forward_method({name!r}) after fabric.setup."
    )


def _is_parallel(tensor: Any) -> bool:
    """Whether a parameter is split by more than FSDP2, so that it stays split while its layer runs."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and "tensor_parallel" in (mesh.mesh_dim_names or ())
