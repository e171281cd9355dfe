"""`LossScale`: a GradScaler that tracks which gradients are scaled."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
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
"""Number of first backwards that search for parameters that were not set up; afterwards the 16th,
32nd, ...
"""


class LossScale:
    """A GradScaler for which all gradients that are accumulated have the same scale.

    A clip or a step unscales gradients in place. The scale changes at the start of the next backward, or when
    the state is saved or loaded. So all optimizers that step after one backward use the scale of their
    gradients. Gradients that still exist then are rescaled to the new scale: of a skipped step, without
    `zero_grad()` after a step, or of an optimizer that has not stepped yet.

    Args:
        scaler: torch's scaler: has the scale, and counts the steps until it grows.
        device: Device type of the gradients.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: str) -> None:
        self.scaler, self.device = scaler, device
        self._owners: WeakSet[Module | Optimizer] = WeakSet()
        self._unscaled_ids: set[int] = set()
        """Ids of parameters whose gradients are unscaled."""
        self._unscaled: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        """{optimizer unscaled since the last update: whether it has not stepped yet}."""
        self._backward_seen = self._stepping = False
        self._passes = 0
        self.never_set_up: dict[int, tuple[ref[Tensor], Any]] = {}
        """{id of a parameter that was not set up: (parameter, its gradient after the last scaled
        backward)}.
        """

    def __reduce__(self) -> Any:
        return type(self), (self.scaler, self.device)  # a copy tracks only models that are set up with it

    def add_owner(self, owner: Module | Optimizer) -> None:
        """Register a model or optimizer: rescale its gradients, and reject steps with scaled gradients."""
        if not self._owners:
            add_step_listener(self)
            add_clip_listener(self)
        self._owners.add(owner)

    def _parameters(self) -> list[Tensor]:
        """Return the parameters of models, then those that only optimizers have; each once."""
        lists = [
            owner.parameters() if hasattr(owner, "parameters") else parameters_of(owner)
            for owner in self._owners
        ]
        return [*{id(p): p for parameters in lists for p in parameters}.values()]

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss; called at the start of a backward."""
        self.update()
        self._backward_seen = True
        self._passes += 1
        if self._passes <= _CHECKED_BACKWARDS or self._passes.bit_count() == 1:
            set_up = {id(p) for p in self._parameters()}
            found = [leaf for leaf in leaves_of([loss]) if id(leaf) not in set_up]
            self.never_set_up |= {id(leaf): (ref(leaf), None) for leaf in found}
        return self.scaler.scale(loss)

    def after_backward(self) -> None:
        """Record the scaled gradients of parameters that were not set up."""
        for key, (parameter, _) in self.never_set_up.items():
            self.never_set_up[key] = parameter, _gradient(tensor_of(parameter))

    def unscale(self, optimizer: Optimizer) -> bool:
        """Unscale the gradients, once per backward; return whether there are gradients.

        Raises:
            UsageError: There are gradients, but there was no scaled backward; or the loop called
                `scaler.unscale_` with an optimizer that `fabric.setup` returned.
        """
        params = [p for p in parameters_of(optimizer) if p.grad is not None]
        held = {id(p) for p in params}
        if held and not self._backward_seen:
            raise UsageError(
                f'{type(optimizer).__name__} has gradients, under precision="16-mixed", before any '
                "fabric.backward(loss), so the loss was not scaled. Write fabric.backward(loss) in place of "
                "loss.backward()."
            )
        if held and not (self._unscaled.get(optimizer) and held <= self._unscaled_ids):
            more = len(optimizer_states(self.scaler)) > len(self._unscaled)
            by_hand = self._unscaled_by_loop() if more else []
            if id(optimizer) not in by_hand:
                if by_hand:
                    raise UsageError(
                        "scaler.unscale_(optimizer) was called by the loop, and this step would divide the "
                        "gradients by the scale again. Leave it out: optimizer.step() and "
                        "fabric.clip_gradients(model, optimizer, max_norm=1.0) unscale them."
                    )
                if optimizer in self._unscaled or not held.isdisjoint(self._unscaled_ids):
                    self.update()  # gradients of its last step, or unscaled by another optimizer
                if len({hasattr(p.grad, "device_mesh") for p in params}) > 1:
                    self._unscale_apart(optimizer, params)
                else:
                    self.scaler.unscale_(optimizer)
            self._unscaled[optimizer] = True
            self._unscaled_ids |= held
        return bool(held)

    def _unscale_apart(self, optimizer: Optimizer, params: list[Any]) -> None:
        """Unscale the gradients: DTensors apart from plain ones, since torch takes one kind at a time."""
        plain = [(p, p.grad) for p in params if not hasattr(p.grad, "device_mesh")]
        apart: Any = SimpleNamespace(param_groups=[{"params": [p for p, _ in plain]}])
        try:
            for p, _ in plain:
                p.grad = None
            self.scaler.unscale_(optimizer)
        finally:
            for p, grad in plain:
                p.grad = grad
        self.scaler.unscale_(apart)
        states = optimizer_states(self.scaler)
        found = states[id(optimizer)]["found_inf_per_device"]
        for device, value in states.pop(id(apart))["found_inf_per_device"].items():
            found[device] = torch.maximum(found.get(device, value), value)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step, or skip the step if a gradient is not finite, since the scale is then too large."""
        if not self.unscale(optimizer):
            return optimizer.step(**kwargs)
        self._unscaled[optimizer] = False
        self._stepping = True
        try:
            return self.scaler.step(optimizer, **kwargs)
        finally:
            self._stepping = False

    def _unscaled_by_loop(self) -> list[int]:
        """Return the ids of optimizers that the loop passed to `scaler.unscale_`."""
        ours = {id(optimizer) for optimizer in self._unscaled}
        states = optimizer_states(self.scaler).items()
        return [key for key, state in states if state["stage"].name == "UNSCALED" and key not in ours]

    def before_clip(self, gradients: list[Tensor]) -> None:
        """Check that gradients are unscaled before torch's functions clip them.

        Raises:
            UsageError: They are scaled.
        """
        if not self._backward_seen or not self.scaler.is_enabled() or self._unscaled_by_loop():
            return
        left = [p for p in self._parameters() if id(p) not in self._unscaled_ids]
        if {id(p.grad) for p in left if p.grad is not None}.intersection(map(id, gradients)):
            raise UsageError(
                'torch.nn.utils got gradients that carry the loss scale of "16-mixed". Clipped now, they '
                "would be almost zero when the step divides them by the scale. Write "
                "fabric.clip_gradients(model, optimizer, max_norm=1.0), or clip_val=, which unscales them."
            )

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Check that gradients are unscaled before a step of any optimizer.

        Raises:
            UsageError: It would step with scaled gradients.
        """
        if self._stepping or not self._backward_seen or not self.scaler.is_enabled():
            return
        held = {id(p) for p in parameters_of(optimizer) if p.grad is not None} - self._unscaled_ids
        forgotten = self.never_set_up and [p for p in parameters_of(optimizer) if self._is_never_set_up(p)]
        if held and (forgotten or any(id(p) in held for p in self._parameters())):
            raise UsageError(
                f"{type(optimizer).__name__}.step() is that of an optimizer which was not set up. Under "
                'precision="16-mixed" gradients are scaled, so it would step by a multiple of them. Write '
                "model, optimizer = fabric.setup(model, optimizer), or optimizer = "
                "fabric.setup_optimizers(optimizer)."
            )

    def _is_never_set_up(self, parameter: Tensor) -> bool:
        known, scaled = self.never_set_up.get(id(parameter), (None, None))
        if known is None or tensor_of(known) is not parameter or scaled is None or parameter.grad is None:
            return False
        gradient, version = scaled  # a weak reference, since ids are reused
        return tensor_of(gradient) is parameter.grad and parameter.grad._version == version

    def update(self) -> None:
        """Update the scale by the steps since the last update."""
        if self._unscaled_ids:
            with self._rescaling():
                self.scaler.update()

    def replace(self, scaler: torch.amp.GradScaler) -> None:
        """Replace the scaler; existing gradients are rescaled."""
        self.update()
        with self._rescaling():
            self.scaler = scaler

    def state(self) -> dict[str, Any]:
        """Return the state of the scaler for a resumed run; it has the last steps if no step is pending.

        The scaler is not changed: another optimizer may step with gradients of the same backward.
        """
        before, steps = self.scaler.state_dict(), dict(optimizer_states(self.scaler))
        if any(self._unscaled.values()) or not self._unscaled_ids:
            return before
        self.scaler.update()
        after = self.scaler.state_dict()
        self.scaler.load_state_dict(before)
        optimizer_states(self.scaler).update(steps)
        return after

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of another run's scaler."""
        self.update()  # belongs to the old state
        with self._rescaling():
            self.scaler.load_state_dict(state)

    @contextmanager
    def _rescaling(self) -> Iterator[None]:
        """Context of a change of the scale: rescales existing gradients. No synchronisation with
        the device.
        """
        groups: dict[Any, list[Any]] = {}
        for p in self._parameters():
            if (grad := p.grad) is not None:
                local = grad.to_local() if hasattr(grad, "to_local") else grad
                key = id(p) in self._unscaled_ids, local.device, local.dtype, local.layout
                groups.setdefault(key, []).append(local)
        before: Any = self._current_scale() if groups else None
        yield
        after: Any = self._current_scale() if groups else None
        for (is_unscaled, device, *_), grads in groups.items():
            with torch.no_grad():
                foreach_mul_(grads, (after if is_unscaled else after / before).to(device))
        self._unscaled_ids.clear()
        self._unscaled.clear()

    def _current_scale(self) -> Any:
        return self.scaler.scale(torch.ones((), device=self.device))


def _gradient(parameter: Tensor | None) -> tuple[ref[Tensor], int] | None:
    """Return a reference to a gradient and its number of in-place changes; None: there is none."""
    grad = None if parameter is None else parameter.grad
    return None if grad is None else (ref(grad), grad._version)
