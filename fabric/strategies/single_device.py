"""`SingleDeviceStrategy`: one process, one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fabric.core.topology import Topology
from fabric.strategies.strategy import Strategy

if TYPE_CHECKING:
    from fabric.accelerators.accelerator import Accelerator
    from fabric.checkpoint.checkpoint_io import CheckpointIO
    from fabric.precision.precision import Precision


class SingleDeviceStrategy(Strategy):
    """All tensors on one device, in one process.

    Args:
        device: The device ("cpu", "cuda:1", a torch.device); None: chosen by `Fabric`.
        accelerator: As in `Strategy`.
        checkpoint_io: As in `Strategy`.
        precision: As in `Strategy`.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = "cpu",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision)
        if device is not None:
            self.parallel_devices = [torch.device(device)]
            self.topology = Topology(device=self.parallel_devices[0])
        self.transport = self.make_transport()
