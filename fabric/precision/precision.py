"""`Precision`: the base of precision plugins, which leaves everything as it is; users subclass it. And from
a precision's name to its plugin: what names there are, and their dtypes, is in `core/precision.py`.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ConfigurationError
from fabric.core.parts import Part
from fabric.core.precision import POLICIES, DtypePolicy, find_policy
from fabric.core.registry import Registry
from fabric.core.traits import overridden

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from fabric.core.types import Optimizable


CONVERSIONS = ("forward_context", "convert_input", "convert_output")
"""Methods that add something to a forward."""

PASSES = ("pre_backward", "backward", "post_backward")
"""Methods that add something to a backward pass."""

PRECISION_REGISTRY = Registry("precision", "fabric.precisions")
"""Precision plugins by name; a factory with a parameter `device` gets the accelerator's device type."""

_HOME = "fabric.precision."
PRECISION_REGISTRY.register("64-true", f"{_HOME}true:DoublePrecision", "all float64")
PRECISION_REGISTRY.register("32-true", f"{_HOME}precision:Precision", "as the model is")
for _name in ("16-true", "bf16-true"):
    PRECISION_REGISTRY.register(_name, f"{_HOME}true:HalfPrecision", "all half", precision=_name)
for _name in ("16-mixed", "bf16-mixed"):
    PRECISION_REGISTRY.register(_name, f"{_HOME}mixed:MixedPrecision", "autocast", precision=_name)
PRECISION_REGISTRY.register(
    "float8", "fabric.integrations.torchao.precision:TorchAOPrecision", "linear layers multiply in float8"
)
_ENGINE = "fabric.integrations.transformer_engine.precision:TransformerEnginePrecision"
for _name, _dtype in (("transformer-engine", torch.bfloat16), ("transformer-engine-float16", torch.float16)):
    PRECISION_REGISTRY.register(_name, _ENGINE, "NVIDIA's Transformer Engine", weights_dtype=_dtype)


class Precision(Part):
    """Dtypes and loss scaling around forward, backward and step. This base is "32-true": nothing is changed.

    A subclass may override any method; which ones it overrides is looked at once, at setup.
    """

    precision: str = "32-true"
    replaces_parameters = False
    """Whether `convert_module` puts others in the place of parameters: no optimizer may hold those, and no
    layout can split what is there then.
    """

    @property
    def policy(self) -> DtypePolicy:
        """The dtype policy that the precision's name stands for."""
        return POLICIES.get(self.precision, POLICIES["32-true"])

    def for_device(self, device_type: str) -> Precision:
        """The plugin for devices of this type (`device_type`, such as "cuda"); called once, by `Fabric`,
        which uses what it gives.
        """
        return self

    @property
    def needs_backward(self) -> bool:
        """Whether this plugin takes part in the backward pass: a plain `loss.backward()` would be wrong."""
        return overridden(type(self), Precision, *PASSES)

    @property
    def needs_step(self) -> bool:
        """Whether this plugin takes part in the optimizer step."""
        return overridden(type(self), Precision, "optimizer_step")

    def convert_module(self, module: Module) -> Module:
        """The module in the dtypes of this precision, changed in place; called once, by `fabric.setup`."""
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Context in which new floating-point tensors get the dtype of this precision."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Context in which new modules get the parameter dtype of this precision."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Context around the user's forward; also what `fabric.autocast()` gives."""
        return nullcontext()

    def convert_input(self, data: Any) -> Any:
        """`data`, the forward's inputs (a tree), in the dtype that the module expects; shapes stay."""
        return data

    def convert_output(self, data: Any) -> Any:
        """`data`, the forward's outputs (a tree), in the dtype that the user's loop expects; shapes stay."""
        return data

    def pre_backward(self, tensor: Tensor, module: Module | None) -> Any:
        """Called before the backward pass; a returned tensor replaces `tensor`, the loss."""

    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass from `tensor`, the loss, with what the user passed to `fabric.backward`."""
        tensor.backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Module | None) -> Any:
        """Called after the backward pass."""

    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """Step the optimizer; `kwargs` are the user's (a `closure`, if any)."""
        return optimizer.step(**kwargs)

    def main_params(self, optimizer: Optimizer) -> Iterator[Parameter]:
        """The parameters whose gradients `clip_gradients` clips."""
        for group in optimizer.param_groups:
            yield from group["params"]

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Bring the gradients back to their true size, if the loss was scaled."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this plugin for a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def teardown(self) -> None:
        """Undo what the plugin changed in the process."""


def policy_of(plugin: Precision, precision: object, *fits: str) -> DtypePolicy:
    """Return the dtype policy of `precision`, which must be one that the plugin supports.

    Raises:
        ConfigurationError: It is none of `fits`.
    """
    if precision not in fits:
        raise ConfigurationError(
            f"{type(plugin).__name__}(precision={precision!r}) is not one of {', '.join(map(repr, fits))}. "
            f"Write Fabric(precision={precision!r}) to get the plugin that fits."
        )
    return POLICIES[precision]


def make_precision(value: object, device_type: str) -> Precision:
    """The plugin for what a user wrote as `precision=`.

    Raises:
        ConfigurationError: The value names no precision.
    """
    policy = find_policy(value)
    name: Any = value if policy is None else policy.name
    takes_device = "device" in inspect.signature(PRECISION_REGISTRY.entry(name).load()).parameters
    plugin: Precision = PRECISION_REGISTRY.get(name, **({"device": device_type} if takes_device else {}))
    return plugin


class DefaultDtype:
    """Context that sets torch's default dtype and restores it. Re-usable, re-entrant."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._previous: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._previous.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exc: object) -> None:
        torch.set_default_dtype(self._previous.pop())
