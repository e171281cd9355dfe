"""`replace_linears`: replace a model's linear layers, for low-precision plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.integrations._torch import CALL_TABLES
from fabric.strategies.tensor_sync import broadcast_from_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def check_settings(feature: str, dtype: Any, ignored: Any) -> set[str]:
    """Return the names of modules that a plugin ignores.

    Raises:
        ArgumentTypeError: `dtype` is not one of 16 or 32 bits, or `ignored` is not a collection of names.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentTypeError(
            f"{feature}: dtype={dtype!r}, that of everything else, must be torch.bfloat16, torch.float16 or "
            "torch.float32."
        )
    names = ignored if isinstance(ignored, set | frozenset | list | tuple) else [None]
    if not all([isinstance(name, str) for name in names]):
        example = ignored if isinstance(ignored, str) else "head"
        raise ArgumentTypeError(
            f"{feature}: ignore_modules={ignored!r} must be a set of names. Write "
            f"ignore_modules={{{example!r}}}."
        )
    return set(names)


def replace_linears(
    module: nn.Module,
    make: Callable[[nn.Linear], nn.Module],
    feature: str,
    ignored: Collection[str] = (),
    replaces: bool = False,
) -> None:
    """Convert each `nn.Linear` of the module to the layer `make(linear)` in place, so references stay valid.

    Layers whose weight is computed (`spectral_norm`, pruning) are left unchanged.

    Args:
        module: The user's module.
        make: Returns the new layer for a linear layer, with the same bias.
        feature: The user's code, for errors.
        ignored: Names of modules that are left unchanged, with their submodules.
        replaces: Whether weights are replaced, too, each once. The new ones are computed from rank zero's
            values, because strategies cannot broadcast them. All ranks must call this then.

    Raises:
        ConfigurationError: There is no linear layer, `ignored` names no module, a weight is on the meta
            device, or is also a parameter of something else.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    unknown = [name for name in ignored if name not in modules]
    if unknown:
        raise ConfigurationError(
            f"{feature}: ignore_modules names {unknown[0]!r}, but {type(module).__name__} has no module of "
            f"that name. Write names such as {', '.join(repr(name) for name in list(modules)[1:6])}, ..."
        )
    kept = {part for name in ignored for part in modules[name].modules()}
    found = {
        name: layer
        for name, layer in modules.items()
        if type(layer) is nn.Linear and "weight" in dict(layer.named_parameters()) and layer not in kept
    }
    if not found:
        raise ConfigurationError(
            f"{feature} replaces linear layers, and {type(module).__name__} has none. Leave it out."
        )
    empty = [name for name, layer in found.items() if layer.weight.is_meta]
    if empty:
        raise ConfigurationError(
            f"{feature} needs values, and {empty[0]!r} is on the meta device. Load the model before setup."
        )
    layers = dict.fromkeys(found.values())
    if replaces:
        _check_ties(module, found, feature)
        if dist.is_initialized():
            broadcast_from_zero([p for layer in layers for p in layer.parameters()])
    of_weight: dict[Any, nn.Module] = {}
    for layer in layers:
        weight = layer.weight
        made = make(layer)
        if replaces:
            made.weight = of_weight.setdefault(weight, made).weight
        _convert_in_place(layer, made)
    for part in module.modules():
        if not layers.keys().isdisjoint(part.modules()):
            _disable_fast_path(part)


def _check_ties(module: nn.Module, found: dict[str, nn.Linear], feature: str) -> None:
    names = {f"{name}.weight".removeprefix("."): name for name in found}
    layer_of = {layer.weight: name for name, layer in found.items()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in layer_of and name not in names:
            raise ConfigurationError(
                f"{feature} would take the weight of {layer_of[parameter]!r} apart from {name!r}, which is "
                f"the same parameter. Leave that layer as it is: ignore_modules={{{layer_of[parameter]!r}}}."
            )


def _convert_in_place(layer: nn.Module, made: nn.Module) -> None:
    """Give the layer the class and contents of `made`: references to it and its hooks stay valid."""
    if made is layer:
        return
    contents = made.__dict__
    kept = {key: value for key, value in vars(layer).items() if key in CALL_TABLES or key not in contents}
    contents.update(kept)
    contents["training"] = layer.training
    layer.__class__, layer.__dict__ = type(made), contents


def _disable_fast_path(part: nn.Module) -> None:
    """Turn off the fast path of torch's encoder, which reads weights of its layers without calling them."""
    if isinstance(part, nn.TransformerEncoderLayer):
        part.activation_relu_or_gelu = 0
    if isinstance(part, nn.TransformerEncoder):
        part.use_nested_tensor = False
