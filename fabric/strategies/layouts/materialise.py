"""Values for parameters on the meta device, block by block, so that a whole model never sits on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from fabric.core.errors import UsageError
from fabric.utilities.deferred import Unmade

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module

    from fabric.utilities.deferred import DeferredInit

_RESETS = ("reset_parameters", "_reset_parameters")


class Materialiser:
    """Gives meta tensors of a model their memory and their values.

    Tensors that were made under `init_module(empty_init=True)` get the values of a plain construction. For
    others (a user's own `torch.device("meta")`) the modules' `reset_parameters()` are called, inner ones
    first.

    Args:
        model: The user's model.
        device: Where the values go.
        init: A function (module) that initialises a module's own parameters, in place of `reset_parameters`.

    Raises:
        UsageError: Something has no way to get values; the message names it.
    """

    def __init__(
        self,
        model: Module,
        device: torch.device,
        init: Callable[[Module], Any] | None = None,
    ) -> None:
        self.device, self._init = device, init
        self._made: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by id of the meta tensor: it, kept, and the real one
        self._resets: dict[Module, Callable[[], Any]] = {}
        self._poisoned: set[int] = set()
        missing: list[str] = []
        self._look(model, "", False, missing)
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise UsageError(
                f"{type(model).__name__} has no initial values for {', '.join(missing[:8])}{more}: on the "
                "meta device, and never initialised. Build it under `with "
                "fabric.init_module(empty_init=True):` with values for all parameters, or give these "
                "modules a reset_parameters()."
            )

    @property
    def resets(self) -> bool:
        """Whether modules have to initialise themselves: nothing is recorded of their tensors."""
        return bool(self._resets)

    @torch.no_grad()
    def value(self, tensor: Tensor, replay: bool) -> Tensor:
        """Memory for a recorded tensor, and with `replay` its values."""
        recorder = self._recorder_of(tensor)
        if recorder is None:
            raise UsageError(
                f"A tensor of shape {list(tensor.shape)} on the meta device has no initial values."
            )
        made = recorder.make(tensor, replay)
        recorder.forget(tensor)
        return made

    def waits(self, module: Module) -> bool:
        """Whether a module initialises its children, too: they must stay whole until it has."""
        return module in self._resets and next(module.children(), None) is not None

    def reset(self, module: Module) -> None:
        """Memory for a module's own tensors of which nothing is recorded, and values by its own function."""
        for slots, name, tensor in _own_meta(module):
            if self._recorder_of(tensor) is None:
                real = torch.empty_like(tensor, device=self.device)
                self._put(slots, name, tensor, real.fill_(torch.nan) if _can_be_nan(real) else real.zero_())
                self._poisoned.add(id(slots[name]))
        if module in self._resets:
            self._resets[module]()

    @torch.no_grad()
    def fill(self, block: Module, replay: bool) -> None:
        """Memory for all recorded tensors of `block`, and with `replay` their values.

        Raises:
            UsageError: A `reset_parameters` left something in the block without values.
        """
        for prefix, module in block.named_modules():
            for slots, name, tensor in _own_meta(module):
                recorder = self._recorder_of(tensor)
                if id(tensor) in self._made or recorder is None:
                    self._put(slots, name, tensor, None)
                    continue
                self._put(slots, name, tensor, recorder.make(tensor, replay))
                recorder.forget(tensor)
            for name, value in [*module._parameters.items(), *module._buffers.items()]:
                if (
                    value is not None
                    and id(value) in self._poisoned
                    and _can_be_nan(value)
                    and value.isnan().any()
                ):
                    raise UsageError(
                        f"{'.'.join(filter(None, [prefix, name]))} in {type(block).__name__} has no values "
                        f"after reset_parameters(). Let {type(module).__name__}.reset_parameters() set it."
                    )

    def release(self, block: Module) -> None:
        """Let go of the block's whole tensors, which are about to be split."""
        gone = {id(t) for m in block.modules() for t in [*m._parameters.values(), *m._buffers.values()]}
        self._made = {key: made for key, made in self._made.items() if id(made[1]) not in gone}
        self._poisoned -= gone

    def _look(self, module: Module, prefix: str, served: bool, missing: list[str]) -> bool:
        """Find reset functions and what none serves; gives whether anything under `module` needs one."""
        reset = self._reset_of(module)
        bare = [name for _, name, tensor in _own_meta(module) if self._recorder_of(tensor) is None]
        if not (served or reset):
            missing += [f"{prefix}{name} of {type(module).__name__}" for name in bare]
        inside = [
            self._look(child, f"{prefix}{name}.", served or reset is not None, missing)
            for name, child in module.named_children()
        ]
        needed = bool(bare) or any(inside)
        if needed and reset is not None:
            self._resets[module] = reset
        return needed

    def _reset_of(self, module: Module) -> Callable[[], Any] | None:
        init = self._init
        if init is not None:
            return lambda: init(module)
        return next((getattr(module, n) for n in _RESETS if callable(getattr(module, n, None))), None)

    def _recorder_of(self, tensor: Tensor) -> DeferredInit | None:
        return tensor.recorder if isinstance(tensor, Unmade) and tensor.recorder.knows(tensor) else None

    def _put(self, slots: dict[str, Any], name: str, tensor: Tensor, real: Tensor | None) -> None:
        """Put `real` in the place of a meta tensor; all places of one tensor (tied weights) get the same."""
        if id(tensor) not in self._made and real is not None:
            if isinstance(tensor, Parameter):
                real = Parameter(real, tensor.requires_grad)
            real.__dict__.update(tensor.users_attributes() if isinstance(tensor, Unmade) else vars(tensor))
            self._made[id(tensor)] = (tensor, real)
        slots[name] = self._made[id(tensor)][1]


def _own_meta(module: Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """A module's own tensors without memory, and where they stand."""
    for slots in (module._parameters, module._buffers):
        for name, tensor in list(slots.items()):
            if tensor is not None and tensor.is_meta:
                yield slots, name, tensor


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
