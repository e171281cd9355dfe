"""`MixedPrecision`: the plugin behind "16-mixed" and "bf16-mixed". Only "16-mixed" has a GradScaler.
`FSDPPrecision`: the name under which Lightning Fabric has the precision of sharded strategies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.precision import parse_precision
from fabric.core.traits import overridden
from fabric.precision._torch import COUNTED_STEP, STEPPED
from fabric.precision.dtypes import CastTo
from fabric.precision.precision import PASSES, Precision, make_precision, policy_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.core.types import Optimizable
    from fabric.precision.loss_scale import LossScale


class MixedPrecision(Precision):
    """Parameters stay as they are; matrix products and convolutions run in half precision through autocast.

    With a scaler, `LossScale` records the scale of each gradient.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: Device type that autocast runs on ("cuda", "cpu").
        scaler: A GradScaler for "16-mixed"; None makes one.
        output_dtype: Dtype of floating-point outputs; None leaves them as computed.

    Raises:
        ConfigurationError: An unknown `precision`, or a scaler for "bf16-mixed".
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: torch.amp.GradScaler | None = None,
        *,
        output_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        self.dtype = policy_of(self, precision, "16-mixed", "bf16-mixed").compute
        if scaler is not None and precision != "16-mixed":
            raise ConfigurationError(
                f"A scaler was given with precision={precision!r}, which needs none: bfloat16 has float32's "
                'range. Leave scaler out, or write precision="16-mixed".'
            )
        if scaler is None and precision == "16-mixed":
            scaler = torch.amp.GradScaler(device=torch.device(device).type)
        self.precision = precision
        self.device = torch.device(device).type
        self._scale: LossScale | None = None
        self.scaler = scaler
        self.output_dtype = output_dtype

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler of "16-mixed"; None: losses are not scaled."""
        return None if self._scale is None else self._scale.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is None:
            self._scale = None
        elif self._scale is not None:
            self._scale.replace(scaler)
        else:
            from fabric.precision.loss_scale import LossScale

            self._scale = LossScale(scaler, self.device)

    @property
    def needs_backward(self) -> bool:
        """True with a scaler, or if a subclass changes the backward pass."""
        return self.scaler is not None or overridden(type(self), MixedPrecision, *PASSES)

    @property
    def needs_step(self) -> bool:
        """True with a scaler, or if a subclass changes the step."""
        return self.scaler is not None or overridden(type(self), MixedPrecision, "optimizer_step")

    def added(self, model: Any, optimizers: Iterable[Optimizer], **_: Any) -> None:
        """Register owners of gradients: with a scaler, a backward multiplies existing ones to its scale.

        Arguments as for `Part.added`.
        """
        for owner in optimizers if model is None else [model.module]:
            if self._scale is not None:
                self._scale.add_owner(owner)

    def copied(self, model: Any) -> None:
        """Register `model`, which was copied or unpickled."""
        self.added(model, ())

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return torch's autocast on the device; `fabric.autocast()` returns it, too."""
        return torch.autocast(self.device, self.dtype)

    def convert_input(self, data: Any) -> Any:
        """Return the tree `data` with floating-point tensors in float32, from which autocast casts."""
        return CastTo(torch.float32)(data)

    def convert_output(self, data: Any) -> Any:
        """Return the tree `data` with floating-point tensors in `output_dtype`."""
        return data if self.output_dtype is None else CastTo(self.output_dtype)(data)

    def backward(self, tensor: Tensor, model: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, with a scaler from the scaled loss. Arguments as for `fabric.backward`."""
        if self._scale is not None:
            tensor = self._scale.scale(tensor)
        tensor.backward(*args, **kwargs)
        if self._scale is not None and self._scale.never_set_up:
            self._scale.after_backward()

    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """Step `optimizer`; with a scaler, all ranks skip the step if a gradient of any rank is not finite.

        `kwargs` are the user's (a `closure`).

        Raises:
            UsageError: A closure with a scaler (the closure would have to unscale in the middle of the step);
                or there was no backward yet.
        """
        if self._scale is None:
            return optimizer.step(**kwargs)
        if kwargs.get("closure") is not None or isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                f"{type(optimizer).__name__}.step(closure) cannot be combined with the gradient scaler of "
                f'precision="16-mixed". Write precision="bf16-mixed" or "32-true", or use an optimizer '
                f"without closure."
            )
        kwargs.pop("closure", None)
        if hasattr(optimizer.step, COUNTED_STEP):
            # A scheduler checks that its optimizer was stepped first; a step that the scaler skips counts.
            setattr(optimizer, STEPPED, True)
        return self._scale.step(optimizer, **kwargs)  # type: ignore[arg-type]

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale, at the first call between a backward and its
        step.
        """
        if self._scale is not None:
            self._scale.unscale(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return {} if self._scale is None else self._scale.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict`, a result of `state_dict()`, into the scaler."""
        if self._scale is not None:
            self._scale.load(state_dict)


class FSDPPrecision(Precision):
    """The same as `Fabric(precision=...)`: the plugin of that name replaces this one.

    Args:
        precision: A name or an alias of it.
        scaler: A GradScaler for "16-mixed"; None makes one.

    Raises:
        ConfigurationError: `precision` names no precision.
    """

    def __init__(self, precision: Any, scaler: Any = None) -> None:
        self.precision = parse_precision(precision).name
        self.scaler = scaler

    def for_device(self, device_type: str) -> Precision:
        """Return the plugin with autocast and loss scale for `device_type`."""
        if self.scaler is not None:
            return MixedPrecision(self.precision, device_type, self.scaler)  # type: ignore[arg-type]
        return make_precision(self.precision, device_type)

    @property
    def mixed_precision_config(self) -> Any:
        """torch's MixedPrecisionPolicy: how FSDP2 gathers parameters and reduces gradients."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = self.policy
        half = policy.compute if policy.autocast else None
        return MixedPrecisionPolicy(half, policy.reduce if half else None, cast_forward_inputs=not half)
