"""Apple's GPU: one device, index 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fabric.accelerators.devices import check_device_type
from fabric.accelerators.generic import TorchAccelerator

if TYPE_CHECKING:
    from fabric.core.registry import Registry


class MPSAccelerator(TorchAccelerator):
    """The GPU of an Apple silicon machine."""

    @classmethod
    def name(cls) -> str:
        """`"mps"`."""
        return "mps"

    def setup_device(self, device: torch.device) -> None:
        """Check that `device` is of this kind; there is one, so nothing is set.

        Raises:
            ConfigurationError: `device` is of another kind.
        """
        check_device_type(device, "mps")

    @classmethod
    def auto_device_count(cls) -> int:
        """One where there is a GPU, else zero."""
        return int(torch.backends.mps.is_available())

    @classmethod
    def explain_unavailable(cls) -> tuple[str, str]:
        """See `Accelerator.explain_unavailable`."""
        return "torch.backends.mps.is_available() is False", "run on a Mac with Apple silicon"

    @classmethod
    def register_accelerators(cls, accelerator_registry: Registry) -> None:
        """Add "mps"."""
        accelerator_registry.register("mps", cls, description="the GPU of an Apple silicon machine")
