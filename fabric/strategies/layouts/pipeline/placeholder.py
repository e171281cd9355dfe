"""`Placeholder`: what `model(x)` gives on ranks that the output does not come to, with `output="last"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten, unflatten
from fabric.strategies.layouts.pipeline.shapes import (
    READERS,
    Valueless,
    as_valueless,
    changes_first,
    compute,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_READERS = READERS | {"__repr__", "__format__", "data_ptr"}
_COMPARING = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "eq", "ne", "lt", "le", "gt", "ge")


class Placeholder(Valueless):
    """A tensor with shape, dtype and gradient, but without values, which are on the last stage.

    Whatever is computed from it (a loss, an accuracy) is one, too, and `fabric.backward` of it takes part in
    the backward of the pipeline. Where values are needed (`item()`, `print`, `if`, a comparison of one
    element) it raises.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every operation on placeholders: on shapes only."""
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            leaves, spec = flatten((args, kwargs or {}))
            scalar = all([leaf.dim() == 0 for leaf in leaves if isinstance(leaf, torch.Tensor)])
            if name in _READERS or (name in _COMPARING and scalar):
                raise _no_values(name)
            if name in ("__get__", "__set__", "backward", "requires_grad_", "detach_", "register_hook"):
                return as_valueless(func(*args, **(kwargs or {})), placeholder)
            changed = leaves[0] if leaves and changes_first(name) else None
            if isinstance(changed, torch.Tensor) and not isinstance(changed, cls):
                raise _no_values(f"{name} into a tensor with values")
            plain, named = unflatten([_shape_of(leaf) for leaf in leaves], spec, None)
            return compute(func, plain, named, placeholder, lambda: _no_values(name))

    def cannot_be_saved(self, name: str) -> UsageError:
        """The error where it is saved."""
        return _no_values(f"Saving {name}")


def placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device as a placeholder, in the same graph."""
    return tensor.as_subclass(Placeholder)


def _shape_of(leaf: Any) -> Any:
    """What stands in for an argument: an operation wants all of its tensors on one device."""
    if isinstance(leaf, Placeholder):
        return leaf.as_subclass(torch.Tensor)
    if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
        if leaf.requires_grad and torch.is_grad_enabled():
            raise UsageError(
                f"A tensor of shape {list(leaf.shape)} that requires a gradient meets a placeholder: with "
                "PipelineStrategy(output='last') only the last stage has the values, so its gradient would "
                "be missing here. Leave output='last' out, or put it into a block of the model."
            )
        return torch.empty_like(leaf, device="meta", requires_grad=False)
    return leaf


def _no_values(name: str) -> UsageError:
    return UsageError(
        f"{name} needs the values of a model's output, but with PipelineStrategy(output='last') only the "
        "last stage has them; this rank has a placeholder of the shape. Do this on the last stage only (if "
        "fabric.strategy.is_last_stage: ...), call fabric.broadcast from there, log it with sync_dist=True, "
        "or leave output='last' out."
    )
