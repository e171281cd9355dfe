"""`MPSAccelerator`: Apple's GPU; one device, index 0."""

from __future__ import annotations

import torch

from fabric.accelerators.generic import TorchAccelerator


class MPSAccelerator(TorchAccelerator):
    """The GPU of an Apple silicon machine."""

    @classmethod
    def name(cls) -> str:
        """Return "mps"."""
        return "mps"

    @classmethod
    def auto_device_count(cls) -> int:
        """Return 1 if there is a GPU, else 0."""
        return int(torch.backends.mps.is_available())

    @classmethod
    def explain_unavailable(cls) -> tuple[str, str]:
        """Return two clauses for an error: why MPS is not available, and a remedy."""
        return "torch.backends.mps.is_available() is False", "run on a Mac with Apple silicon"
