"""Forward plans with hooks on their outputs, which run when a backward reaches them.

A hook raises if a plain backward would be wrong, or notifies a layout that synchronises after it. Casts and
autocast of a precision: strategies/precise_forward.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core._torch import is_custom_function_input, will_run
from fabric.core.errors import UsageError
from fabric.core.tree import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

_Tensor = torch.Tensor


class HookedForward:
    """A forward or bound method; each of its outputs calls `on_backward` when a backward reaches it."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call and hook every output tensor that a backward may start from."""
        out = self.call(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for leaf in (out,) if type(out) is _Tensor and out.requires_grad else differentiable(out):
                if leaf.grad_fn is not None:  # hooks of a parameter would stay forever
                    (leaf if leaf._base is None else hook_target(leaf)).register_hook(self.on_backward)
        return out

    def on_backward(self, grad: torch.Tensor) -> None:
        """Do nothing; called by each backward that reaches an output."""


class GuardedForward(HookedForward):
    """A forward whose outputs raise in a plain `loss.backward()`, for strategies where it would be wrong.

    Args:
        call: The forward.
        gate: The gate of the strategy; its `open` is true while `fabric.backward` runs.
    """

    __slots__ = ("gate",)

    def __init__(self, call: Callable[..., Any], gate: Any) -> None:
        super().__init__(call)
        self.gate = gate

    def on_backward(self, grad: torch.Tensor) -> None:
        """Check that `fabric.backward` runs this backward.

        Raises:
            UsageError: A plain `loss.backward()` is running.
        """
        if self.gate.open or not _writes_gradients(self.call):
            return
        raise UsageError(
            "loss.backward() was called where it gives wrong gradients: this strategy or precision has to "
            "scale, move or synchronise them. Write fabric.backward(loss) instead."
        )


class NotifyingForward(HookedForward):
    """A forward or bound method whose outputs notify the layout when a backward reaches them.

    The layout synchronises buffers after a backward, which all ranks run. So evaluation sends none.
    """

    __slots__ = ("layout", "replica")

    def __init__(self, call: Callable[..., Any], layout: Any, replica: torch.nn.Module) -> None:
        super().__init__(call)
        self.layout = layout
        self.replica = replica

    def on_backward(self, grad: torch.Tensor) -> None:
        """Notify the layout."""
        self.layout.on_reached(self.replica)

    def __getattr__(self, name: str) -> Any:
        if name in ("call", *NotifyingForward.__slots__):  # not set yet, while copying
            raise AttributeError(name)
        return getattr(self.call, name)


def differentiable(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of `tree` that require gradients."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, _Tensor) and leaf.requires_grad]


def hook_target(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on which to register a hook for a backward that reaches `tensor`.

    In-place changes drop hooks of views, so a view's base is hooked. A view of an input is hooked itself.
    """
    base = tensor._base
    if base is None or base.grad_fn is None:
        return tensor
    return tensor if is_custom_function_input(tensor) else base


def _writes_gradients(plan: Any) -> bool:
    """Whether the backward pass that runs now writes `.grad` of the module behind `plan`.

    `torch.autograd.grad` (a gradient penalty) writes none, and its gradients are right.
    """
    while hasattr(plan, "call"):
        plan = plan.call
    module = getattr(plan, "__self__", None) or getattr(plan, "replica", None)
    if not isinstance(module, torch.nn.Module):
        return True
    edges = [torch.autograd.graph.get_gradient_edge(p) for p in module.parameters() if p.requires_grad]
    try:
        return any([will_run(edge.node) for edge in edges])
    except RuntimeError:  # raised by torch if autograd.grad was called with these parameters as inputs
        return False
