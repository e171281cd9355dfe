"""Moving an optimizer's state between devices. Called by strategies after a load. Never moves parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.utilities.apply_func import move_data_to_device

if TYPE_CHECKING:
    from torch.optim import Optimizer


def move_optimizer_to_device(optimizer: Optimizer, device: torch.device | str | int) -> None:
    """Move the state of `optimizer` to `device`, in place.

    Step counts of optimizers that are neither capturable nor fused stay on the CPU, where torch reads them
    without waiting for the device.
    """
    target = torch.device(device)
    for group in optimizer.param_groups:
        on_device = target.type == "cpu" or bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            if parameter in optimizer.state:
                state: dict[str, Any] = optimizer.state[parameter]
                for key, value in state.items():
                    state[key] = move_data_to_device(value, target if key != "step" or on_device else "cpu")
