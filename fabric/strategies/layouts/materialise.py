"""Values for parameters on the meta device, block by block, so that a whole model never sits on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from fabric.core.errors import UsageError
from fabric.utilities.deferred import Unmade

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module


class Materialiser:
    """Gives meta tensors of a model their memory and their values, those of a plain construction.

    Args:
        model: The user's model.

    Raises:
        UsageError: Something was not made under `init_module(empty_init=True)`, or never initialised; named.
    """

    def __init__(self, model: Module) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        """By id of the meta tensor: it, kept, and the real one."""
        missing = [
            f"{'.'.join(filter(None, [path, name]))} of {type(module).__name__}"
            for path, module in model.named_modules()
            for _, name, tensor in _own_meta(module)
            if not _is_known(tensor)
        ]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise UsageError(
                f"{type(model).__name__} has no initial values for {', '.join(missing[:8])}{more}: on the "
                "meta device, and never initialised. Build it under `with "
                "fabric.init_module(empty_init=True):` (in place of torch.device('meta')), with values for "
                "all parameters, or give them memory and values before fabric.setup."
            )

    @torch.no_grad()
    def value(self, tensor: Tensor, replay: bool) -> Tensor:
        """Memory for a recorded tensor, and with `replay` its values."""
        if not _is_known(tensor):
            raise UsageError(
                f"A tensor of shape {list(tensor.shape)} on the meta device has no initial values."
            )
        recorder = tensor.recorder  # type: ignore[attr-defined]
        made: Tensor = recorder.make(tensor, replay)
        recorder.forget(tensor)
        return made

    def fill(self, block: Module, replay: bool) -> None:
        """Memory for all recorded tensors of `block`, and with `replay` their values; tied ones stay tied."""
        for module in block.modules():
            for slots, name, tensor in _own_meta(module):
                if id(tensor) not in self._made:
                    real = self.value(tensor, replay)
                    if isinstance(tensor, Parameter):
                        real = Parameter(real, tensor.requires_grad)
                    real.__dict__.update(tensor.users_attributes())  # type: ignore[attr-defined]
                    self._made[id(tensor)] = (tensor, real)
                slots[name] = self._made[id(tensor)][1]

    def release(self, block: Module) -> None:
        """Let go of the block's whole tensors, which are about to be split."""
        gone = {id(t) for m in block.modules() for t in [*m._parameters.values(), *m._buffers.values()]}
        self._made = {key: made for key, made in self._made.items() if id(made[1]) not in gone}


def _is_known(tensor: Tensor) -> bool:
    return isinstance(tensor, Unmade) and tensor.recorder.knows(tensor)


def _own_meta(module: Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """A module's own tensors without memory, and where they stand."""
    for slots in (module._parameters, module._buffers):
        for name, tensor in list(slots.items()):
            if tensor is not None and tensor.is_meta:
                yield slots, name, tensor
