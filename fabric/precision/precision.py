"""`Precision`: the base class of precision plugins, and the registry of plugins by name.

Names and their dtypes are in `core/precision.py`.
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
"""Methods of a plugin that change a forward."""

PASSES = ("pre_backward", "backward", "post_backward")
"""Methods of a plugin that change a backward pass."""

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
    """Dtypes and loss scaling of forward, backward and step. This base class is "32-true": it changes
    nothing.

    A subclass may override any method. Overridden methods are detected once, at setup.
    """

    precision: str = "32-true"
    replaces_parameters = False
    """Whether `convert_module` replaces parameters. Then optimizers cannot be created before it, and layouts
    cannot shard the new ones.
    """

    @property
    def policy(self) -> DtypePolicy:
        """The dtype policy of the precision's name."""
        return POLICIES.get(self.precision, POLICIES["32-true"])

    def for_device(self, device_type: str) -> Precision:
        """Return the plugin to use for `device_type`, such as "cuda"; called once, by `Fabric`."""
        return self

    @property
    def needs_backward(self) -> bool:
        """Whether this plugin changes the backward pass, so that a plain `loss.backward()` would be wrong."""
        return overridden(type(self), Precision, *PASSES)

    @property
    def needs_step(self) -> bool:
        """Whether this plugin changes the optimizer step."""
        return overridden(type(self), Precision, "optimizer_step")

    def convert_module(self, module: Module) -> Module:
        """Convert `module` to the dtypes of this precision in place, and return it; called by setup."""
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Context in which new floating-point tensors get the dtype of this precision."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Context in which new modules get the parameter dtype of this precision."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Context around the user's forward; also returned by `fabric.autocast()`."""
        return nullcontext()

    def convert_input(self, data: Any) -> Any:
        """Return the forward's inputs `data` (a tree) in the dtype that the module expects."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Return the forward's outputs `data` (a tree) in the dtype that the user's loop expects."""
        return data

    def pre_backward(self, tensor: Tensor, module: Module | None) -> Any:
        """Run before the backward pass; a returned tensor replaces `tensor`, the loss.

        `module`: the argument `model` of `fabric.backward`, or None.
        """

    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass from `tensor`, the loss. Arguments as for `fabric.backward`."""
        tensor.backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Module | None) -> Any:
        """Run after the backward pass. Arguments as for `pre_backward`."""

    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """Step `optimizer`, and return the result of its `step`; `kwargs` are the user's (a `closure`)."""
        return optimizer.step(**kwargs)

    def main_params(self, optimizer: Optimizer) -> Iterator[Parameter]:
        """Yield the parameters of `optimizer` whose gradients `clip_gradients` clips."""
        for group in optimizer.param_groups:
            yield from group["params"]

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of `optimizer`, if the loss was scaled."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this plugin for a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict`, a result of `state_dict()`."""

    def teardown(self) -> None:
        """Restore settings of the process that the plugin changed."""


def policy_of(plugin: Precision, precision: object, *fits: str) -> DtypePolicy:
    """Return the dtype policy of `precision`, which must be in `fits`, the names that the plugin supports.

    Raises:
        ConfigurationError: It is not in `fits`.
    """
    if precision not in fits:
        raise ConfigurationError(
            f"{type(plugin).__name__}(precision={precision!r}) is not one of {', '.join(map(repr, fits))}. "
            f"Write Fabric(precision={precision!r}), which chooses the plugin."
        )
    return POLICIES[precision]


def make_precision(value: object, device_type: str) -> Precision:
    """Return the plugin for the argument `precision=` of `Fabric`.

    Raises:
        ConfigurationError: There is no precision of this name.
    """
    policy = find_policy(value)
    name: Any = value if policy is None else policy.name
    takes_device = "device" in inspect.signature(PRECISION_REGISTRY.entry(name).load()).parameters
    plugin: Precision = PRECISION_REGISTRY.get(name, **({"device": device_type} if takes_device else {}))
    return plugin


class DefaultDtype:
    """Context that sets torch's default dtype and restores it. Reusable and reentrant."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._previous: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._previous.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exc: object) -> None:
        torch.set_default_dtype(self._previous.pop())
