"""torch's "mixed torch.Tensor and DTensor" in the user's words: where, and what to write."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from fabric.core.errors import UsageError
from fabric.core.source import is_users, line_name
from fabric.core.torch_internals import computes_in

if TYPE_CHECKING:
    from collections.abc import Callable


def split_error(
    error: BaseException, call: Callable[..., Any], root: Any, method: bool, marked: bool
) -> UsageError | None:
    """What to raise in the place of `error`; None where it is another one.

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
    places = [p for p in traceback.extract_tb(error.__traceback__) if is_users(p.filename)]
    where = f" ({line_name(places[-1].filename, places[-1].lineno or 0)})" if places else ""
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
