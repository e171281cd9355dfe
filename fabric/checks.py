"""What the setup verbs refuse, before they change anything: each check raises one error with its remedy."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.utilities.compile import is_compiled
from fabric.wrappers import _FabricModule, is_wrapped, unwrap


def check_module(module: Any, verb: str) -> None:
    """Raise unless `module` can be set up: a module, not yet wrapped."""
    if is_wrapped(module):
        raise ConfigurationError(
            f"{verb}: this {type(unwrap(module)).__name__} is set up already. Set each model up once and "
            "keep the result."
        )
    if not isinstance(module, Module):
        raise ArgumentTypeError(f"{verb} needs a torch.nn.Module first, but got {type(module).__name__}.")


def check_optimizers(optimizers: tuple[Any, ...], verb: str) -> None:
    """Raise unless all can be set up: optimizers, each once, not yet wrapped."""
    for optimizer in optimizers:
        if is_wrapped(optimizer):
            raise ConfigurationError(
                f"{verb}: this {type(unwrap(optimizer)).__name__} is set up already. Set each optimizer up "
                "once and keep the result."
            )
        if not isinstance(optimizer, Optimizer):
            scheduler = hasattr(optimizer, "get_last_lr")
            hint = " Schedulers need no setup: keep using yours as it is." if scheduler else ""
            raise ArgumentTypeError(
                f"{verb} needs torch optimizers, but got {type(optimizer).__name__}.{hint}"
            )
    if len({id(o) for o in optimizers}) != len(optimizers):
        raise ConfigurationError(f"{verb}: the same optimizer was passed twice. Pass each once.")


def check_owned(optimizers: tuple[Optimizer, ...], modules: list[Module], verb: str) -> None:
    """Raise if an optimizer holds parameters of no module that is set up: they would not be synchronised."""
    owned = {id(p) for module in modules for p in module.parameters()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [tuple(p.shape) for p in held if id(p) not in owned]
        if foreign:
            raise ConfigurationError(
                f"{verb}: {len(foreign)} of {len(held)} parameters of {type(optimizer).__name__} (shapes "
                f"{', '.join(map(str, foreign[:3]))}) belong to no model that is set up. Make the optimizer "
                f"from this model's .parameters(), or set all its models up with setup_module first, then "
                f"setup_optimizers."
            )


def check_forward_module(module: Any, verb: str) -> Module:
    """The wrapped module behind a model that is set up; raises for one that is not."""
    while is_compiled(module):
        module = module._orig_mod
    if not isinstance(module, _FabricModule):
        raise UsageError(
            f"{verb} needs a model that is set up, but got {type(module).__name__}. Write model = "
            "fabric.setup(model) first and pass that."
        )
    joined: Module = module._fabric_joined
    return joined


def check_optimizer(optimizer: Any, verb: str) -> None:
    """Raise unless `optimizer` is one, as `setup` gave it or the user's own."""
    if not isinstance(unwrap(optimizer), Optimizer):
        raise ArgumentTypeError(
            f"{verb} needs optimizer= as fabric.setup gave it, but got {type(optimizer).__name__}. "
            f"Leave it out for all gradients of the model."
        )


def item_count(value: Any, verb: str) -> int | float:
    """A number of items as a Python number; waits for a tensor on a device.

    Raises:
        ArgumentTypeError: Neither a real number nor a tensor with one.
        ConfigurationError: Negative, not finite, or too large for 64 bits.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        given = type(value).__name__
        if isinstance(value, torch.Tensor):
            given = f"a tensor of shape {list(value.shape)} on {value.device.type}"
        elif isinstance(value, bool | complex):
            given = repr(value)
        raise ArgumentTypeError(
            f"{verb} needs num_items as a number or a one-element tensor, but got {given}. "
            f"Count the items of all micro-batches of the step on this rank: num_items += mask.sum()"
        )
    count = int(value) if isinstance(value, Integral) else float(value)
    if not 0 <= count < 2**63:
        raise ConfigurationError(
            f"{verb}: num_items={count} is not a number of items: it must be 0 or more, finite, and less "
            f"than 2**63. Count the items of all micro-batches of the step on this rank."
        )
    return count


def check_loaders(loaders: tuple[Any, ...]) -> None:
    """Raise unless all can be set up: at least one, all DataLoaders, none wrapped yet."""
    if not loaders:
        raise ConfigurationError("fabric.setup_dataloaders() needs at least one DataLoader.")
    for loader in loaders:
        if is_wrapped(loader):
            raise ConfigurationError(
                "fabric.setup_dataloaders: this loader is set up already. Set each up once."
            )
        if not isinstance(loader, torch.utils.data.DataLoader):
            raise ArgumentTypeError(
                "fabric.setup_dataloaders needs torch.utils.data.DataLoader objects, but got "
                f"{type(loader).__name__}."
            )
