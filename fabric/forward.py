"""Forward plans whose outputs notice a backward: it is refused where it would be wrong, or a layout hears of
it, to synchronise something after it.

What precisions add to a forward: strategies/precise_forward.py.
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
    """A forward or bound method of whose outputs each calls `reached` when a backward comes to it."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call and hook every output tensor that a backward may start from."""
        out = self.call(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for leaf in (out,) if type(out) is _Tensor and out.requires_grad else differentiable(out):
                if leaf.grad_fn is not None:  # a parameter that is an output keeps its hooks for ever
                    (leaf if leaf._base is None else anchor(leaf)).register_hook(self.reached)
        return out

    def reached(self, grad: torch.Tensor) -> None:
        """A backward has come to an output."""


class GuardedForward(HookedForward):
    """The plan where a plain `loss.backward()` would be wrong: hooks the outputs so that it raises.

    Args:
        call: What runs.
        gate: Of the strategy; its `open` is true while `fabric.backward` runs.
    """

    __slots__ = ("gate",)

    def __init__(self, call: Callable[..., Any], gate: Any) -> None:
        super().__init__(call)
        self.gate = gate

    def reached(self, grad: torch.Tensor) -> None:
        """A backward has come to an output.

        Raises:
            UsageError: A plain `loss.backward()` is running.
        """
        if self.gate.open or not _accumulates(self.call):
            return
        raise UsageError(
            "loss.backward() was called where it gives wrong gradients: this strategy or precision has to "
            "scale, move or synchronise them. Write fabric.backward(loss) instead."
        )


class HookedCall(HookedForward):
    """A forward or bound method whose outputs tell the layout when a backward reaches them.

    Buffers are sent at the end of a backward pass, where all ranks are: so an evaluation forward sends none.
    """

    __slots__ = ("layout", "replica")

    def __init__(self, call: Callable[..., Any], layout: Any, replica: torch.nn.Module) -> None:
        super().__init__(call)
        self.layout = layout
        self.replica = replica

    def reached(self, grad: torch.Tensor) -> None:
        """Tell the layout."""
        self.layout.on_reached(self.replica)

    def __getattr__(self, name: str) -> Any:
        if name in ("call", *HookedCall.__slots__):  # not set yet, while copying
            raise AttributeError(name)
        return getattr(self.call, name)


def differentiable(tree: Any) -> list[torch.Tensor]:
    """The tensors of `tree` that a backward pass starts from or passes through."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, _Tensor) and leaf.requires_grad]


def anchor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on which to register a hook for a backward that reaches `tensor`.

    In-place changes drop hooks of views. A view of what was there before the call (an input) is its own
    anchor.
    """
    base = tensor._base
    if base is None or base.grad_fn is None:
        return tensor
    return tensor if is_custom_function_input(tensor) else base


def _accumulates(plan: Any) -> bool:
    """Whether the backward pass that runs now writes `.grad` of the module behind `plan`.

    `torch.autograd.grad` (a gradient penalty) writes none, gives true gradients, and is left alone.
    """
    while hasattr(plan, "call"):
        plan = plan.call
    module = getattr(plan, "__self__", None) or getattr(plan, "replica", None)
    if not isinstance(module, torch.nn.Module):
        return True
    edges = [torch.autograd.graph.get_gradient_edge(p) for p in module.parameters() if p.requires_grad]
    try:
        return any([will_run(edge.node) for edge in edges])
    except RuntimeError:  # torch's answer where these very parameters are what autograd.grad was asked for
        return False
