"""`CUDAAccelerator`: NVIDIA's and AMD's GPUs, counted through NVML so that fork stays possible."""

from __future__ import annotations

import os

import torch

from fabric.accelerators.generic import TorchAccelerator
from fabric.accelerators.usable import find_usable_devices


class CUDAAccelerator(TorchAccelerator):
    """CUDA devices; ranks communicate by NCCL.

    Devices are queried at call time. `auto_device_count` and `is_available` use `torch.cuda.device_count()`,
    which queries NVML and leaves CUDA uninitialised. `torch.cuda.is_available()` would initialise the driver,
    so that children forked afterwards could not use it.
    """

    @classmethod
    def name(cls) -> str:
        """Return "cuda"."""
        return "cuda"

    @classmethod
    def explain_unavailable(cls) -> tuple[str, str]:
        """Return two clauses for an error: why no CUDA device is available, and a remedy."""
        fact = "torch.cuda.is_available() is False"
        if torch.version.cuda is None and torch.version.hip is None:
            return fact, "install a CUDA build of torch"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if visible is None else f" and CUDA_VISIBLE_DEVICES, which is {visible!r}"
        return fact, f"check the driver with nvidia-smi{hint}"

    @classmethod
    def _visibility_hint(cls) -> str:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "" if visible is None else f" CUDA_VISIBLE_DEVICES={visible!r} renumbers them from 0."


is_cuda_available, num_cuda_devices = CUDAAccelerator.is_available, CUDAAccelerator.auto_device_count


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of CUDA devices that accept an allocation now, as `find_usable_devices` does.

    Args:
        num_devices: Number of devices to find; -1 for all usable ones, possibly none.

    Raises:
        ArgumentTypeError: `num_devices` is no int.
        ConfigurationError: Below -1, or more than this machine has.
        UsageError: Fewer are usable now (a RuntimeError).
    """
    return find_usable_devices(num_devices, "cuda")
