"""`convert`: moves and conversions of a model after `fabric.setup`. Called by the module wrapper."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten
from fabric.utilities.init import name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module


def convert(model: Any, function: Callable[[Any], Any], recurse: bool) -> None:
    """Move or convert the tensors of a model that is set up, and keep a forward that explains errors of it.

    Args:
        model: What `fabric.setup` returned.
        function: Moves or converts one tensor.
        recurse: Whether it is called with the tensors of submodules, too.

    Raises:
        UsageError: The tensors cannot be moved there (a device that is not there).
    """
    module, own = model.module, model.__dict__
    before = _kind_of(module)
    try:
        own["_forward_module"]._apply(function, recurse)
    except UsageError:
        raise
    except (AssertionError, RuntimeError) as error:
        reason = str(error).rstrip(".")
        raise UsageError(
            f"{name_of(module)} cannot be moved or converted like this: {reason}. fabric.setup has placed it "
            f"on {before[1]}. Delete the call, and choose the device by Fabric(accelerator=...)."
        ) from error
    plan = own["forward"]
    if isinstance(plan, ConvertedForward):
        before, plan = plan.original, plan.plan
    now = _kind_of(module)
    own["forward"] = plan if now == before else ConvertedForward(plan, before, now, name_of(module))


def _kind_of(module: Module) -> tuple[torch.dtype, torch.device]:
    """Return dtype and device of the first tensor of a module."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return (torch.get_default_dtype(), torch.device("cpu")) if first is None else (first.dtype, first.device)


class ConvertedForward:
    """The forward of a model that was converted after `fabric.setup`: explains what torch raises for it.

    Args:
        plan: The forward of the strategy.
        original: dtype and device of the first tensor at setup.
        now: dtype and device of the first tensor.
        name: The name of the model in messages.
    """

    def __init__(self, plan: Any, original: Any, now: Any, name: str) -> None:
        self.plan, self.original, self.now, self.name = plan, original, now, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the strategy."""
        try:
            return self.plan(*args, **kwargs)
        except UsageError:
            raise
        except RuntimeError as error:
            tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
            if (text := self._explanation(tensors)) is None:
                raise
            raise UsageError(text) from error

    def _explanation(self, tensors: list[torch.Tensor]) -> str | None:
        dtype, device = self.now
        if device.type == "meta":
            return (
                f"{self.name} was moved to the meta device after fabric.setup, and has no values. Delete the "
                "call, or set up a new model."
            )
        odd = [x for x in tensors if x.is_floating_point() and x.dtype != dtype]
        if odd:
            return (
                f"{self.name} was converted to {dtype} after fabric.setup, but its input is {odd[0].dtype}. "
                "Write Fabric(precision=...), which converts inputs, too."
            )
        if odd := [x for x in tensors if x.device != device]:
            return (
                f"{self.name} was moved to {device} after fabric.setup, but its input is on {odd[0].device}. "
                "Delete the call: fabric.setup has placed the model."
            )
        return None
