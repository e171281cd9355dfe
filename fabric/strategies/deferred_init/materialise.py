"""Initialisation of parameters on the meta device, block by block, so that no rank holds a whole model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from fabric.core.errors import UsageError
from fabric.strategies.buffers import is_rank_local
from fabric.strategies.deferred_init._torch import RESET_METHODS
from fabric.strategies.deferred_init.deferred import DeferredInit, DeferredTensor
from fabric.strategies.sharding.blocks import innermost_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module


class Materialiser:
    """Allocates and initialises the meta tensors of a model.

    Tensors created under `init_module(empty_init=True)` get the values of a plain construction. For others
    (of `torch.device("meta")`) the modules' `reset_parameters()` are called, inner modules first.

    Args:
        model: The user's model.
        device: Device of the values.
        init: A function (module) that initialises a module's direct parameters, in place of
            `reset_parameters`.

    Raises:
        UsageError: A tensor is not initialised after that; the error names it.
    """

    def __init__(
        self,
        model: Module,
        device: torch.device,
        init: Callable[[Module], Any] | None = None,
    ) -> None:
        self._materialised: dict[Tensor, Tensor] = {}
        """{meta tensor: real tensor}; tied weights get the same one."""
        recorder = DeferredInit(device)
        adopted: dict[Tensor, Any] = {}
        bare: set[Module] = set()
        for module in innermost_first(model):
            for slots, name, tensor in meta_slots(module):
                if not isinstance(tensor, DeferredTensor):
                    if tensor not in adopted:
                        adopted[tensor] = recorder.adopt(tensor)
                    slots[name] = adopted[tensor]
                if not slots[name].recorder.has_values(slots[name]):
                    bare.add(module)
            methods = [getattr(module, n) for n in RESET_METHODS if callable(getattr(module, n, None))]
            resets = [partial(init, module)] if init else methods[:1]
            if not bare.isdisjoint(module.modules()):
                for reset in resets:
                    reset()
        _check_initialised(model)

    @torch.no_grad()
    def fill(self, block: Module, replay: bool) -> None:
        """Allocate all tensors of `block`; with `replay` initialise them."""
        for module in block.modules():
            for slots, name, tensor in meta_slots(module):
                if tensor not in self._materialised:
                    real = tensor.recorder.make(tensor, replay or is_rank_local(module, name))
                    if isinstance(tensor, Parameter):
                        real = Parameter(real, tensor.requires_grad)
                    real.__dict__.update(tensor.users_attributes())
                    self._materialised[tensor] = real
                slots[name] = self._materialised[tensor]

    def release(self, block: Module) -> None:
        """Drop references to the block's full tensors, before they are sharded."""
        released = {*block.parameters(), *block.buffers()}
        self._materialised = {meta: real for meta, real in self._materialised.items() if real not in released}


def _check_initialised(model: Module) -> None:
    missing = [
        f"{path}{'.' * bool(path)}{name} of {type(module).__name__}"
        for path, module in model.named_modules()
        for _, name, tensor in meta_slots(module)
        if not tensor.recorder.has_values(tensor)
    ]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise UsageError(
            f"{type(model).__name__} has no initial values for {', '.join(missing[:8])}{more}: they are on "
            "the meta device, and never initialised. Build it under `with "
            "fabric.init_module(empty_init=True):` with values for all parameters, or give these modules a "
            "reset_parameters() that sets them."
        )


def meta_slots(module: Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield (dictionary, name, tensor) of a module's direct meta tensors."""
    for slots in (module._parameters, module._buffers):
        for name, tensor in list(slots.items()):
            if tensor is not None and tensor.is_meta:
                yield slots, name, tensor
