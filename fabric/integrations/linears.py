"""`replace_linears`: other layers in the places of a model's linear ones, for low-precision plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from fabric.core.errors import ConfigurationError
from fabric.strategies.layouts.agree import broadcast_from_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


def replace_linears(
    module: nn.Module,
    make: Callable[[nn.Linear], nn.Module],
    asked: str,
    ignored: Collection[str] = (),
    share: bool = False,
) -> nn.Module:
    """The module with what `make` gives in the place of each `nn.Linear`; changed in place, unless it is one.

    Args:
        module: The user's.
        make: From a layer to another one.
        asked: What the user wrote, for errors.
        ignored: Names of modules that are left as they are, with all below them.
        share: Rank zero's values count: what is made of them are no values that a strategy could send.
            All ranks must call this then.

    Raises:
        ConfigurationError: There is no linear layer, a name of `ignored` is that of no module, or a weight
            has no values yet.
    """
    modules = dict(module.named_modules())
    unknown = [name for name in ignored if name not in modules]
    if unknown:
        raise ConfigurationError(
            f"{asked} was told to leave {unknown[0]!r} as it is, but {type(module).__name__} has no module "
            f"of that name. It has {', '.join(repr(name) for name in list(modules)[1:6])}, ..."
        )
    below = tuple([f"{name}." for name in ignored])
    found = {
        name: layer
        for name, layer in modules.items()
        if type(layer) is nn.Linear and name not in ignored and not name.startswith(below)
    }
    if not found:
        raise ConfigurationError(
            f"{asked} replaces linear layers, and {type(module).__name__} has none. Leave it out."
        )
    empty = [name for name, layer in found.items() if layer.weight.is_meta]
    if empty:
        raise ConfigurationError(
            f"{asked} needs values, and {empty[0]!r} is on the meta device. Load the model before setup."
        )
    if share and dist.is_initialized():
        broadcast_from_zero([p for layer in found.values() for p in layer.parameters()])
    for name, layer in found.items():
        if not name:
            return make(layer)
        parent, _, last = name.rpartition(".")
        setattr(modules[parent], last, make(layer))
    return module
