"""Forward plans: what runs between `model(x)` and the user's `forward`. Composed once, at setup.

A plan is the module's own `__call__` where nothing is added, else an object with `__call__` (never a closure,
so that deepcopy, pickle and torch.compile work). Each stage adds one frame; the identity is not built.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import flatten
from fabric.utilities.dtypes import CastTo

if TYPE_CHECKING:
    from collections.abc import Callable

_Tensor, _FLOAT = torch.Tensor, torch.float32


class AutocastForward:
    """The plan of "16-mixed" and "bf16-mixed": autocast around the call, float outputs in `output`."""

    __slots__ = ("_cast_input", "_cast_output", "call", "device_type", "dtype", "output")

    def __init__(
        self, call: Callable[..., Any], device_type: str, dtype: torch.dtype, output: torch.dtype | None
    ) -> None:
        self.call = call
        self.device_type = device_type
        self.dtype = dtype
        self.output = output
        self._cast_input = CastTo(torch.float32)
        self._cast_output = CastTo(output)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call; `output` None means "as computed"."""
        # One plain float32 tensor is the common case, and costs no frame.
        if kwargs or len(args) != 1 or type(args[0]) is not _Tensor or args[0].dtype is not torch.float32:
            args, kwargs = self._cast_input.arguments(args, kwargs)
        if torch.compiler.is_compiling():
            with torch.autocast(self.device_type, self.dtype):
                out = self.call(*args, **kwargs)
        else:
            # What `with torch.autocast` does, at a third of its cost: all that it checks is known since
            # setup.
            kind = self.device_type
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, self.dtype)
            torch.set_autocast_cache_enabled(True)
            torch.autocast_increment_nesting()
            try:
                out = self.call(*args, **kwargs)
            finally:
                if torch.autocast_decrement_nesting() == 0:
                    torch.clear_autocast_cache()
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
                torch.set_autocast_cache_enabled(cached)
        if self.output is None:
            return out
        if type(out) is _Tensor and out.is_floating_point():
            return out.float() if self.output is _FLOAT else out.to(self.output)
        return self._cast_output(out)


class CastForward:
    """The plan of "64-true", "16-true", "bf16-true": inputs in `dtype`, which is the default inside."""

    __slots__ = ("_cast_input", "_cast_output", "call", "dtype")

    def __init__(self, call: Callable[..., Any], dtype: torch.dtype, output: torch.dtype | None) -> None:
        self.call = call
        self.dtype = dtype
        self._cast_input = CastTo(dtype)
        self._cast_output = CastTo(output)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call with `dtype` as torch's default dtype, restored whatever happens."""
        args, kwargs = self._cast_input.arguments(args, kwargs)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            out = self.call(*args, **kwargs)
        finally:
            torch.set_default_dtype(previous)
        return self._cast_output(out)


class PluginForward:
    """The plan for a precision plugin with its own `convert_input`, `convert_output` or `forward_context`."""

    __slots__ = ("call", "precision")

    def __init__(self, call: Callable[..., Any], precision: Any) -> None:
        self.call = call
        self.precision = precision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call between the plugin's own conversions."""
        precision = self.precision
        args, kwargs = precision.convert_input((args, kwargs))
        with precision.forward_context():
            out = self.call(*args, **kwargs)
        return precision.convert_output(out)

    def __deepcopy__(self, memo: dict[int, Any]) -> PluginForward:
        # A copied model shares the plugin: what it holds (a loss scale) is of the job, not of a model.
        return PluginForward(deepcopy(self.call, memo), self.precision)


class BackwardGate:
    """Open while `fabric.backward` runs. Guarded outputs refuse a backward that comes past it."""

    __slots__ = ("__weakref__", "open", "passes")

    def __init__(self) -> None:
        self.open = False
        self.passes = 0
        """How many backwards have begun; the watchdog looks at it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> BackwardGate:
        return self  # `fabric.backward` opens one gate for a model and its copies


class GuardedForward:
    """The plan where a plain `loss.backward()` would be wrong: hooks the outputs so that it raises."""

    __slots__ = ("call", "gate")

    def __init__(self, call: Callable[..., Any], gate: BackwardGate) -> None:
        self.call = call
        self.gate = gate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call and hook every output tensor that requires a gradient."""
        out = self.call(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for leaf in (out,) if type(out) is _Tensor and out.requires_grad else differentiable(out):
                if leaf.grad_fn is not None:  # a parameter that is an output keeps its hooks for ever
                    (leaf if leaf._base is None else anchor(leaf)).register_hook(self.check)
        return out

    def check(self, grad: torch.Tensor) -> None:
        """The hook on guarded outputs.

        Raises:
            UsageError: A plain `loss.backward()` is running.
        """
        if self.gate.open or not _accumulates(self.call):
            return
        raise UsageError(
            "loss.backward() was called where it gives wrong gradients: this strategy or precision has to "
            "scale, move or synchronise them. Write fabric.backward(loss) instead."
        )


def differentiable(tree: Any) -> list[torch.Tensor]:
    """The tensors of `tree` that a backward pass starts from or passes through."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, _Tensor) and leaf.requires_grad]


def anchor(tensor: torch.Tensor) -> torch.Tensor:
    """Where a hook hangs that is to see a backward come to `tensor`: changes in place drop hooks of views.

    A view of what was there before the call (an input) is its own anchor.
    """
    base = tensor._base
    if base is None or base.grad_fn is None:
        return tensor
    passed_on = torch._C._autograd.CreationMeta.IN_CUSTOM_FUNCTION
    return tensor if torch._C._autograd._get_creation_meta(tensor) == passed_on else base


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
        return any([torch._C._will_engine_execute_node(edge.node) for edge in edges])
    except RuntimeError:  # torch's answer where these very parameters are what autograd.grad was asked for
        return False
