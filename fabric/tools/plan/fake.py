"""Tensors without values, for `fabric plan --fake`: models need no memory, and operations take no time.

Messages of ranks about a model are still computed with values.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fabric.collectives import objects
from fabric.tools.plan._torch import FakeTensorMode, unset_fake_temporarily

NO_VALUES = (
    "tensors have no values, and the script decides by one. Leave --fake out, or move the decision out of "
    "the first two steps"
)


class UnknownNumber(float):
    """The result of `.item()`: it can be printed, summed and averaged. A comparison with it is an error."""

    __slots__ = ()

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError(f"With --fake, {NO_VALUES}")

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __int__ = _refuse
    __hash__ = float.__hash__


class FakeTensors:
    """Makes parameters and buffers of all modules fake from now on, and all results in its mode."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: Any = WeakIdKeyDictionary()
        item: Any = torch.Tensor.item
        module: Any = nn.Module
        tensor: Any = torch.Tensor
        tensor.item = lambda one: UnknownNumber(1.0) if getattr(one, "fake_mode", None) else item(one)
        for method in ("register_parameter", "register_buffer"):
            setattr(module, method, self._registering(getattr(module, method)))
        module._apply = _apply
        torch.distributed.Reducer = Reducer  # type: ignore[misc]
        with_values = {
            value: _with_values(value)
            for value in vars(objects).values()
            if callable(value) and getattr(value, "__module__", "") == objects.__name__
            if not isinstance(value, type)
        }
        for name, loaded in list(sys.modules.items()):
            if name.startswith("fabric."):
                for key, value in list(vars(loaded).items()):
                    if callable(value) and getattr(value, "__module__", "") == objects.__name__:
                        vars(loaded)[key] = with_values.get(value, value)

    def of(self, value: Any) -> Any:
        """Return a tensor without values; other objects unchanged."""
        if not isinstance(value, torch.Tensor) or hasattr(value, "fake_mode"):
            return value
        if (made := self._made.get(value)) is None:
            with self.mode:  # not by from_tensor: Module.to swaps no parameter with weak references
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            if isinstance(value, nn.Parameter):
                made = nn.Parameter(made, value.requires_grad)
            self._made[value] = made
        return made

    def convert(self, model: nn.Module, *optimizers: Any) -> None:
        """Make the tensors of a model and its optimizers fake, in place."""
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                table.update({name: self.of(value) for name, value in table.items()})
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["params"] = [self.of(p) for p in group["params"]]

    def _registering(self, register: Any) -> Any:
        @functools.wraps(register)
        def registered(module: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            return register(module, name, self.of(value), *args, **kwargs)

        return registered


class Reducer(torch.distributed.Reducer):
    """DDP's reducer with the buckets of the first step, since new buckets depend on values of tensors."""

    def _rebuild_buckets(self) -> bool:
        return False


def _apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Run `Module.to` without swapping tensors: torch cannot swap tensors that a fake mode has used."""
    for child in module.children() if recurse else ():
        _apply(child, function)
    for table in (module._parameters, module._buffers):
        for value in table.values():
            if value is not None:
                with torch.no_grad():
                    value.data = function(value)
    return module


def _with_values(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call
