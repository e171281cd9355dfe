"""`LossScale`: a GradScaler, and which gradients carry its scale."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from fabric.core._torch import foreach_mul_, tensor_of
from fabric.core.backward_listeners import add_clip_listener, add_step_listener, leaves_of, parameters_of
from fabric.core.errors import UsageError
from fabric.precision._torch import optimizer_states

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


_CHECKED_BACKWARDS = 8
"""Backwards in which parameters are looked for that nobody has set up; afterwards in 16, 32, 64, ..."""


class LossScale:
    """Whatever a loop does between its backwards, gradients that it adds up carry one scale.

    A clip or a step brings gradients to their true size, in place. The scale changes when the next backward
    begins (or the state is saved or loaded). All optimizers that step after one backward then use the scale
    that their gradients carry. What gradients are left then are brought to the new scale: of a step
    that the loop left out, or without `zero_grad()` after it, or of an optimizer that has not stepped yet.

    Args:
        scaler: Has the scale, and counts the steps until it grows.
        device: Device type of the gradients.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: str) -> None:
        self.scaler, self.device = scaler, device
        self._owners: WeakSet[Module | Optimizer] = WeakSet()
        self._true: set[int] = set()
        """Of parameters: those whose gradients have their true size."""
        self._unscaled: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        """Optimizers that have brought theirs there since the last update; whether they are to step yet."""
        self._begun = self._stepping = False
        self._passes = 0
        self.never_set_up: dict[int, tuple[ref[Tensor], Any]] = {}
        """By id, parameters that nobody has set up, and the gradient that the last scaled backward left."""

    def __reduce__(self) -> Any:
        return type(self), (self.scaler, self.device)  # a copy follows what is set up with it

    def add_owner(self, owner: Module | Optimizer) -> None:
        """Bring its gradients to the current scale from now on; refuse steps that take them as they are."""
        if not self._owners:
            add_step_listener(self)
            add_clip_listener(self)
        self._owners.add(owner)

    def _parameters(self) -> list[Tensor]:
        """Return the parameters of models, then those that only optimizers hold; each once."""
        held = [
            owner.parameters() if hasattr(owner, "parameters") else parameters_of(owner)
            for owner in self._owners
        ]
        return [*{id(p): p for some in held for p in some}.values()]

    def scale(self, loss: Tensor) -> Tensor:
        """The loss of a backward that begins."""
        self.update()
        self._begun = True
        self._passes += 1
        if self._passes <= _CHECKED_BACKWARDS or self._passes.bit_count() == 1:
            known = {id(p) for p in self._parameters()}
            found = [leaf for leaf in leaves_of([loss]) if id(leaf) not in known]
            self.never_set_up |= {id(leaf): (ref(leaf), None) for leaf in found}
        return self.scaler.scale(loss)

    def after_backward(self) -> None:
        """Note the scaled gradients of parameters that nobody has set up."""
        for key, (known, _) in self.never_set_up.items():
            self.never_set_up[key] = known, _gradient(tensor_of(known))

    def unscale(self, optimizer: Optimizer) -> bool:
        """Bring the gradients to their true size, however often called. Gives whether there are any.

        Raises:
            UsageError: There are, and there was no backward yet that scales; or the loop called
                `scaler.unscale_` with an optimizer that `fabric.setup` returned.
        """
        held = {id(p) for p in parameters_of(optimizer) if p.grad is not None}
        if held and not self._begun:
            raise UsageError(
                f'{type(optimizer).__name__} has gradients, under precision="16-mixed", before any '
                "fabric.backward(loss). Write that instead of loss.backward(), so that the loss is scaled."
            )
        if held and not (self._unscaled.get(optimizer) and held <= self._true):
            more = len(optimizer_states(self.scaler)) > len(self._unscaled)
            by_hand = self._unscaled_by_loop() if more else []
            if id(optimizer) not in by_hand:
                if by_hand:
                    raise UsageError(
                        "scaler.unscale_(optimizer) was called by the loop, and this step would divide the "
                        "gradients by the scale once more. Leave it out: optimizer.step() and "
                        "fabric.clip_gradients(model, optimizer, max_norm=1.0) unscale them."
                    )
                if optimizer in self._unscaled or not held.isdisjoint(self._true):
                    self.update()  # they are of its last step, or another optimizer's
                self.scaler.unscale_(optimizer)
            self._unscaled[optimizer] = True
            self._true |= held
        return bool(held)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step, unless a gradient is not finite; then the scale is too large, and the step is left out."""
        if not self.unscale(optimizer):
            return optimizer.step(**kwargs)
        self._unscaled[optimizer] = False
        self._stepping = True
        try:
            return self.scaler.step(optimizer, **kwargs)
        finally:
            self._stepping = False

    def _unscaled_by_loop(self) -> list[int]:
        """The ids of optimizers whose gradients the loop has unscaled by the scaler itself."""
        own = {id(optimizer) for optimizer in self._unscaled}
        states = optimizer_states(self.scaler).items()
        return [key for key, state in states if state["stage"].name == "UNSCALED" and key not in own]

    def before_clip(self, gradients: list[Tensor]) -> None:
        """Before torch's own functions clip gradients, or take their norm to do so.

        Raises:
            UsageError: They carry the scale.
        """
        if not self._begun or not self.scaler.is_enabled() or self._unscaled_by_loop():
            return
        left = [p for p in self._parameters() if id(p) not in self._true]
        if {id(p.grad) for p in left if p.grad is not None}.intersection(map(id, gradients)):
            raise UsageError(
                'torch.nn.utils got gradients that carry the loss scale of "16-mixed". Clipped now, they '
                "would be next to nothing once the step has divided them by the scale. Write "
                "fabric.clip_gradients(model, optimizer, max_norm=1.0), or clip_val=, which unscales them."
            )

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Before a step of any optimizer.

        Raises:
            UsageError: It would take gradients as they are, scaled.
        """
        if self._stepping or not self._begun or not self.scaler.is_enabled():
            return
        held = {id(p) for p in parameters_of(optimizer) if p.grad is not None} - self._true
        forgotten = self.never_set_up and [p for p in parameters_of(optimizer) if self._is_never_set_up(p)]
        if held and (forgotten or any(id(p) in held for p in self._parameters())):
            raise UsageError(
                f"{type(optimizer).__name__}.step() is that of an optimizer which was not set up, and under "
                'precision="16-mixed" gradients are scaled: it would step by a multiple of them. Write '
                "model, optimizer = fabric.setup(model, optimizer), or optimizer = "
                "fabric.setup_optimizers(optimizer)."
            )

    def _is_never_set_up(self, parameter: Tensor) -> bool:
        known, scaled = self.never_set_up.get(id(parameter), (None, None))
        if known is None or tensor_of(known) is not parameter or scaled is None or parameter.grad is None:
            return False
        gradient, version = scaled  # by reference: memory of one that was dropped may hold the next one
        return tensor_of(gradient) is parameter.grad and parameter.grad._version == version

    def update(self) -> None:
        """Update the scale by the steps since the last update."""
        if self._true:
            with self._kept():
                self.scaler.update()

    def replace(self, scaler: torch.amp.GradScaler) -> None:
        """Go on with another scaler."""
        self.update()
        with self._kept():
            self.scaler = scaler

    def state(self) -> dict[str, Any]:
        """Return the state of the scaler for a resumed run, without gradients that were not stepped yet."""
        if not any(self._unscaled.values()):
            self.update()
        return self.scaler.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Take another run's scale."""
        self.update()  # what was due belongs to the state that is left
        with self._kept():
            self.scaler.load_state_dict(state)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Gradients that are there mean the same under the scale that comes. Waits for no device."""
        left: dict[Any, list[Any]] = {}
        for p in self._parameters():
            if (grad := p.grad) is not None:
                own = grad.to_local() if hasattr(grad, "to_local") else grad
                left.setdefault((id(p) in self._true, own.device, own.dtype, own.layout), []).append(own)
        before: Any = self._now() if left else None
        yield
        after: Any = self._now() if left else None
        for (true, device, *_), grads in left.items():
            with torch.no_grad():
                foreach_mul_(grads, (after if true else after / before).to(device))
        self._true.clear()
        self._unscaled.clear()

    def _now(self) -> Any:
        return self.scaler.scale(torch.ones((), device=self.device))


def _gradient(parameter: Tensor | None) -> tuple[ref[Tensor], int] | None:
    """Return a reference to a gradient and its number of in-place changes; None: there is none."""
    grad = None if parameter is None else parameter.grad
    return None if grad is None else (ref(grad), grad._version)
