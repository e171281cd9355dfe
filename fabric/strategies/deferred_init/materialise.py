"""Values for parameters on the meta device, block by block, so that a whole model never sits on one rank."""

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
    """Gives meta tensors of a model their memory and their values.

    Tensors that were made under `init_module(empty_init=True)` get the values of a plain construction. Others
    (a user's own `torch.device("meta")`) are recorded from here on, and the modules' `reset_parameters()`
    called, inner ones first.

    Args:
        model: The user's model.
        device: Where the values go.
        init: A function (module) that initialises a module's own parameters, in place of `reset_parameters`.

    Raises:
        UsageError: Something has no values after that; the message names it.
    """

    def __init__(
        self,
        model: Module,
        device: torch.device,
        init: Callable[[Module], Any] | None = None,
    ) -> None:
        self._made: dict[Tensor, Tensor] = {}
        """For each meta tensor the real one; all places of one (tied weights) get the same."""
        recorder = DeferredInit(device)
        adopted: dict[Tensor, Any] = {}
        bare: set[Module] = set()
        for module in innermost_first(model):
            for slots, name, tensor in own_meta(module):
                if not isinstance(tensor, DeferredTensor):
                    if tensor not in adopted:
                        adopted[tensor] = recorder.adopt(tensor)
                    slots[name] = adopted[tensor]
                if not slots[name].recorder.knows(slots[name]):
                    bare.add(module)
            own = [getattr(module, name) for name in RESET_METHODS if callable(getattr(module, name, None))]
            resets = [partial(init, module)] if init else own[:1]
            if not bare.isdisjoint(module.modules()):
                for reset in resets:
                    reset()
        _check_known(model)

    @torch.no_grad()
    def fill(self, block: Module, replay: bool) -> None:
        """Memory for all tensors of `block`, and with `replay` their values."""
        for module in block.modules():
            for slots, name, tensor in own_meta(module):
                if tensor not in self._made:
                    real = tensor.recorder.make(tensor, replay or is_rank_local(module, name))
                    if isinstance(tensor, Parameter):
                        real = Parameter(real, tensor.requires_grad)
                    real.__dict__.update(tensor.users_attributes())
                    self._made[tensor] = real
                slots[name] = self._made[tensor]

    def release(self, block: Module) -> None:
        """Let go of the block's whole tensors, which are about to be split."""
        gone = {*block.parameters(), *block.buffers()}
        self._made = {meta: real for meta, real in self._made.items() if real not in gone}


def _check_known(model: Module) -> None:
    missing = [
        f"{path}{'.' * bool(path)}{name} of {type(module).__name__}"
        for path, module in model.named_modules()
        for _, name, tensor in own_meta(module)
        if not tensor.recorder.knows(tensor)
    ]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise UsageError(
            f"{type(model).__name__} has no initial values for {', '.join(missing[:8])}{more}: on the "
            "meta device, and never initialised. Build it under `with fabric.init_module(empty_init=True):` "
            "with values for all parameters, or give these modules a reset_parameters() that sets them."
        )


def own_meta(module: Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """A module's own tensors without memory, and where they stand."""
    for slots in (module._parameters, module._buffers):
        for name, tensor in list(slots.items()):
            if tensor is not None and tensor.is_meta:
                yield slots, name, tensor
